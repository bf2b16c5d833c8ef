"""Time training steps and single connections of every kind against yardsticks that are never improved.

    python -m bench.overhead --json overhead.json
    python -m bench.overhead --only connections --widths 512,1024 --kinds hc,mhc,mhc_lite,kromhc

- ``steps``: one training step of each kind, by this project's trainer with all its checks, and the shortest step of the
  same plain architecture (``bench.reference.plain_step``), which all are divided by.
- ``connections``: one connection around tanh, forward and backward, with gradients of the streams and of the
  parameters; and the same connection written with einsums (``bench.reference.einsum``).

A round runs everything once in turn, so that other load on the machine hits all alike. Figures are medians over rounds
with quartiles; a ratio is taken round by round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import arguments, timing
from bench.model import Sizes, add_sizes, random_batch, sizes_of, stepping
from mhc import cli
from mhc import kinds as kind_table
from mhc.errors import UserError

YARDSTICK = "reference"
SUBLAYERS = 8  # what kinds are told that depend on depth


def steps(kinds: Sequence[str], sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Time a training step of each kind and the yardstick's; return {arm: figures}.

    The figures are {seconds, cpu_seconds, of_reference, of_plain}, each {median, low, high}; ``of_plain`` is there if
    plain is among the kinds.
    """
    import jax

    from mhc import sharding
    from mhc.train.step import Trainer

    functions: dict[str, Callable[[], Any]] = {YARDSTICK: _reference_step(sizes)}
    for kind in kinds:
        config = sizes.config(kind, probe_every=0)
        mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
        trainer = Trainer(config, mesh)
        batch = sharding.put_batch(random_batch(config), mesh)
        functions[kind] = stepping(trainer.step, trainer.init(0), batch)
    samples = timing.interleaved(functions, rounds)
    return _compared(samples, {"of_reference": YARDSTICK, "of_plain": "plain"})


def _reference_step(sizes: Sizes) -> Callable[[], Any]:
    import jax

    from bench.reference import plain_step

    shape = plain_step.Sizes(sizes.width, sizes.blocks, sizes.heads, sizes.length, sizes.vocabulary)
    params = plain_step.initial(shape, jax.random.key(0))
    optimizer = plain_step.optimizer(1000)
    batch = random_batch(sizes.config("plain"))
    tokens, targets = (jax.device_put(batch[name]) for name in ("tokens", "targets"))
    return stepping(plain_step.make_step(optimizer), (params, optimizer.init(params)), tokens, targets)


def connections(
    kinds: Sequence[str], width: int, tokens: tuple[int, int], streams: int, rounds: int, calls: int = 1
) -> dict[str, Any]:
    """Time one connection of each kind, and einsum versions of hc and mhc; return {arm: figures}.

    The figures are {seconds, cpu_seconds, of_mhc_einsum, of_mhc}, each {median, low, high}. Kinds that do not have so
    many streams take their default.

    Args:
      tokens: (B, T).
    """
    functions = {f"{name} einsum": _einsum_connection(name, width, tokens, streams) for name in ("hc", "mhc")}
    functions |= {kind: _connection(kind, width, tokens, streams) for kind in kinds}
    samples = timing.interleaved(functions, rounds, calls=calls)
    return _compared(samples, {"of_mhc_einsum": "mhc einsum", "of_mhc": "mhc"})


def _compared(samples: Mapping[str, timing.Sample], bases: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of every arm; ``bases``: the name of a ratio and the arm that it divides by."""
    return {
        arm: timing.seconds(sample)
        | {name: timing.ratio(sample, samples[base]) for name, base in bases.items() if base in samples}
        for arm, sample in samples.items()
    }


def _connection(kind: str, width: int, tokens: tuple[int, int], streams: int) -> Callable[[], Any]:
    """Return a function that runs a connection of a kind around tanh, forward and backward."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from mhc import residual
    from mhc.rng import path_key

    spec = kind_table.known()[kind]
    options = {"n": streams} if streams in spec.streams and "n" in residual.protocol.options(kind) else {}
    key = path_key(jax.random.key(0))
    topology = residual.build(kind, width, rngs=key / "topology", sublayers=SUBLAYERS, **options)
    graph, params = nnx.split(topology.connection(1, rngs=key / "connection"))
    state = topology.expand(jax.random.normal(jax.random.key(1), (*tokens, width), jnp.float32))

    def forward(params: Any, state: Any) -> Any:
        connection = nnx.merge(graph, params)
        u, context = connection.read(state)
        return connection.write(state, jnp.tanh(u), context)

    return _gradients(forward, params, state)


def _einsum_connection(name: str, width: int, tokens: tuple[int, int], streams: int) -> Callable[[], Any]:
    """Return a function that runs the einsum version of a connection around tanh, forward and backward."""
    import jax
    import jax.numpy as jnp

    from bench.reference import einsum
    from mhc.residual import functional

    initial: Callable[..., Any] = functional.hc_params if name == "hc" else functional.mhc_params
    params = initial(streams, width, k=1)
    h = jax.random.normal(jax.random.key(1), (*tokens, width), jnp.float32)
    state = jnp.broadcast_to(h[..., None, :], (*tokens, streams, width))
    return _gradients(lambda params, x: einsum.CONNECTIONS[name](x, params, jnp.tanh), params, state)


def _gradients(forward: Callable[[Any, Any], Any], params: Any, state: Any) -> Callable[[], Any]:
    """Return a function that gives the next state, and the gradients of parameters and state under a fixed cotangent.

    Only leaves of floating point have a cotangent and a gradient.
    """
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten(state)
    moving = [number for number, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def run(params: Any, leaves: list[Any], cotangent: list[Any]) -> Any:
        def of_floats(params: Any, floats: list[Any]) -> list[Any]:
            whole = list(leaves)
            for number, leaf in zip(moving, floats, strict=True):
                whole[number] = leaf
            out = jax.tree.leaves(forward(params, jax.tree.unflatten(structure, whole)))
            return [out[number] for number in moving]

        out, pull = jax.vjp(of_floats, params, [leaves[number] for number in moving])
        return out, pull(cotangent)

    compiled = jax.jit(run)
    cotangent = [jax.random.normal(jax.random.key(2), leaves[number].shape, leaves[number].dtype) for number in moving]
    leaves = [jnp.array(leaf) for leaf in leaves]
    return lambda: compiled(params, leaves, cotangent)


def print_table(title: str, arms: Mapping[str, Any]) -> None:
    """Print the figures, an arm a line."""
    ratios = [name for name in next(iter(arms.values())) if name.startswith("of_")]
    sys.stdout.write(f"{title:16} {'ms':>9} {'quartiles':>17}" + "".join(f"{name:>15}" for name in ratios) + "\n")
    for arm, row in arms.items():
        median, low, high = (1e3 * row["seconds"][name] for name in ("median", "low", "high"))
        line = f"{arm:16} {median:9.2f} {low:8.2f} {high:8.2f}"
        sys.stdout.write(line + "".join(f"{row[name]['median']:15.3f}" for name in ratios) + "\n")


def main(arguments_: Sequence[str]) -> int:
    """Read the command line, measure, print tables; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    parser = cli.Parser(
        description="Time steps and single connections of residual kinds against yardsticks that are never improved.",
        example=(
            "{prog} --json overhead.json",
            "{prog} --only connections --widths 512,1024 --kinds hc,mhc,mhc_lite,kromhc",
        ),
    )
    every = ",".join(kind_table.names())
    parser.add_argument("--kinds", default=every, metavar="KIND,…", help="default: every kind")
    parser.add_argument("--only", choices=("steps", "connections"), help="one of the two measures; default: both")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument("--widths", default="512,1024", metavar="D,…", help="connections: widths (default 512,1024)")
    parser.add_argument("--tokens", default="8,256", metavar="B,T", help="connections: rows and tokens (default 8,256)")
    parser.add_argument("--streams", type=int, default=4, help="connections: N (default 4)")
    add_sizes(parser, Sizes())
    arguments.add_json(parser)
    options = parser.parse_args(arguments_)
    kinds = arguments.kind_names(options.kinds, "--kinds")
    rounds, widths = arguments.at_least(options.rounds, "--rounds"), arguments.numbers(options.widths, "--widths")
    streams = arguments.at_least(options.streams, "--streams")
    tokens = options.tokens.split(",")
    if len(tokens) != 2 or not all(part.isdecimal() and int(part) for part in tokens):
        raise UserError(f"--tokens: {options.tokens!r}, allowed: two whole numbers B,T")
    sizes = sizes_of(options, Sizes())
    arguments.check_json(options.json)
    figures: dict[str, Any] = {**timing.machine(), "rounds": rounds}
    if options.only != "connections":
        figures["steps"] = steps(kinds, sizes, rounds)
        print_table("step", figures["steps"])
    if options.only != "steps":
        figures["connections"] = {}
        shape = (int(tokens[0]), int(tokens[1]))
        for width in widths:
            figures["connections"][str(width)] = connections(kinds, width, shape, streams, rounds)
            print_table(f"width {width}", figures["connections"][str(width)])
    timing.write(figures, options.json)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
