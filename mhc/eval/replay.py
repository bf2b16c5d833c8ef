"""Replay a step of a run, to see what happened at step s and whether another configuration would have done the same.

    python -m eval.replay RUN --step s [--from k] [--rows R] [--nan] [--config.GROUP.FIELD=VALUE …]

This restores the last checkpoint before step s (without one: initialises from the run's seed), feeds the run's own
batches to the same compiled step, and prints the loss, the gradient norm and the profile over sublayers of step s, with
the batch's hash and documents. Without overrides the numbers are compared with those that the run logged: on the same
kind of device they are equal bit for bit, and the exit code is 1 where they are not. On CPU the number of cores is part
of the kind, since it decides how sums are split: the command takes no more cores than the run had.

With overrides that change the model or the state of the optimiser no checkpoint fits: the weights are then initialised
afresh from the seed, and the run's batches are replayed from step 1, or from step k. Other overrides (a learning rate,
a clipping norm) go on from the checkpoint.

``--nan`` looks at every operation of the step's loss and gradient, and names the first that gives a NaN: its line of
the source, and the calls above it.

A run that was rewound is replayed as it stands: what a rewind threw away is gone, and the batches that it left out are
left out again. The run's folder is only read.

The module is longer than most: a replay has one order of restoring, feeding and comparing, and it reads best in one.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import cli, remote
from mhc import config as configs
from mhc.config import Config
from mhc.errors import UserError
from mhc.files import read_json, read_jsonl

if TYPE_CHECKING:
    from mhc.data.pipeline import TrainIterator
    from mhc.train.step import Trainer, TrainState

# The batches of the run are the point of a replay: what decides them stays.
_BATCHES = ("data.", "train.batch_size", "seed.data")
_HARMLESS = ("data.prefetch", "data.cache_dir")  # of these groups, yet not of the batches
# Fields that decide what the weights are, apart from their shapes.
_WEIGHTS = ("model.", "attention.", "positions.", "mlp.", "moe.", "norm.", "head.", "init.", "residual.", "seed.init")
_LOGGED = ("loss", "grad_norm", "update_norm", "param_norm", "lr", "logit_max", "log_z")


@dataclasses.dataclass(frozen=True)
class Replay:
    """Holds the results of step ``step`` of a run, done again.

    Attributes:
        step: which one.
        start: completed steps of the state that the replay began with; None: fresh weights from the seed.
        first: the step whose batch was replayed first.
        changes: {field: (the run's value, the replay's)}.
        metrics: the step's scalars, by their names in metrics.jsonl.
        profile: {measure: [S]} in depth order: ``grad_norm`` and ``update_ratio`` of the step, and measures of the
            forward pass on rows of the step's batch with the weights that it began with.
        batch_hash: of the batch, as in events.jsonl.
        documents: where each row of the batch begins.
        differences: {metric: (logged, replayed)} where they are not equal; None where nothing was compared.
        event: what events.jsonl says of the step, if anything.
        nan: where the first NaN of the step is made, lines of text; empty: nowhere; None: not asked for.
    """

    step: int
    start: int | None
    first: int
    changes: Mapping[str, tuple[Any, Any]]
    metrics: Mapping[str, float]
    profile: Mapping[str, np.ndarray]
    batch_hash: str
    documents: Sequence[Mapping[str, Any]]
    differences: Mapping[str, tuple[Any, Any]] | None
    event: Mapping[str, Any] | None
    nan: Sequence[str] | None


class _Stored(NamedTuple):
    """Holds what a replay needs of a run folder."""

    folder: remote.Folder  # with the checkpoints
    config: Config
    metrics: Mapping[int, Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]


def replay(
    run: str | Path,
    step: int,
    *,
    first: int | None = None,
    rows: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
    nan: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Do step ``step`` of a run again.

    Args:
        run: its folder.
        step: from 1 to the last logged.
        first: the first step to replay, from the state of the last checkpoint before it; None: the one after the last
            checkpoint before ``step``, or 1 with fresh weights.
        rows: how many rows of the batch the profile's forward measures take; None: monitor.probe_sequences, 0: all.
        overrides: {dotted field: value}.
        devices: those of jax to use; None: all.
        nan: whether to look for the first NaN of step ``step``.
        say: called with lines on what is going on.

    Raises:
        UserError: no run, a step that it did not log, an override of what decides the batches, or data that is gone.
    """
    stored = _read(run)
    last = max(stored.metrics)
    if not 1 <= step <= last:
        raise UserError(f"--step: given {step}, allowed: 1 to {last}, the steps that {run} has logged")
    if first is not None and not 1 <= first <= step:
        raise UserError(f"--from: given {first}, allowed: 1 to {step}, the step to replay")
    changed = change(stored.config, overrides or {})
    changes = configs.diff(stored.config, changed)

    # jax takes seconds to import: only a command without mistakes waits for it.
    import jax

    from mhc.data import pipeline, tokenizers
    from mhc.monitor import probes
    from mhc.sharding import check_batch, make_mesh, put_batch
    from mhc.train.record import batch_hash
    from mhc.train.step import Trainer

    tokenizer = tokenizers.load(changed.data.tokenizer)
    config = configs.resolve(changed, tokenizer.vocab_size)
    mesh = make_mesh(config.mesh, None if devices is None else list(devices))
    check_batch(config.train.batch_size // config.train.accumulation, mesh, "train.batch_size / train.accumulation")
    trainer = Trainer(config, mesh)
    fresh = any(name.startswith(_WEIGHTS) for name in changes) or (
        bool(changes) and not _same_state(trainer.abstract, stored.config, mesh)
    )
    wanted = (first or (1 if fresh else step)) - 1  # completed steps to start from

    reading = dataclasses.replace(config.data, workers=0)  # a few batches: sooner read than processes started
    data = pipeline.train_iterator(reading, tokenizer, batch_size=config.train.batch_size, seed=config.seed.data)
    try:
        state, start, completed = _restored(stored, trainer, data, fresh, wanted)
        say(_beginning(start, fresh, config, changes))

        left_out = batches_left_out(stored.events)
        begin = wanted if fresh else completed
        for done in range(completed, begin):  # fresh weights need only the data to be where step ``first`` begins
            _skip(data, left_out.get(done, 0) + 1)
        for done in range(begin, step):
            _skip(data, left_out.get(done, 0))
            position = data.get_state()
            batch = next(data)
            if done == step - 1:
                measured = _forward(probes, trainer, state, batch, rows, config)
                where = _first_nan(trainer, state, put_batch(batch, mesh), done) if nan else None
            state, metrics = trainer.step(state, put_batch(batch, mesh))
            jax.block_until_ready(state)  # programs with collectives must not overlap on CPU devices
            if (done + 1 - begin) % 100 == 0:
                say(f"step {done + 1} of {step}")
        values = jax.device_get(metrics)
        documents = data.describe(position)
    finally:
        data.close()

    scalars = {name: float(values[name]) for name in _LOGGED}
    profile = _of_sublayers(values)
    events = [event for event in standing(stored.events) if event["step"] == step]
    return Replay(
        step=step,
        start=start,
        first=begin + 1,
        changes=changes,
        metrics=scalars,
        profile=profile | measured,
        batch_hash=batch_hash(batch),
        documents=documents,
        differences=None if changes else _differences(stored.metrics[step], scalars, profile["grad_norm"]),
        event=events[-1] if events else None,
        nan=where,
    )


def _restored(
    stored: _Stored, trainer: Trainer, data: TrainIterator, fresh: bool, wanted: int
) -> tuple[TrainState, int | None, int]:
    """Return (state, completed steps of it, completed steps of the data) of the last checkpoint up to ``wanted`` steps.

    The data is set to where the checkpoint left it. The state is initialised from the seed, with None for its steps,
    where there is no checkpoint or the weights are to be ``fresh``.
    """
    from mhc.train.checkpoint import Checkpoints, committed_steps
    from mhc.train.start import initial_state, state_of_weights

    checkpoint = max((done for done in committed_steps(stored.folder) if done <= wanted), default=None)
    if checkpoint is None:
        return initial_state(trainer), None, 0
    checkpoints = Checkpoints(stored.folder, trainer.config.checkpoint, read_only=True)
    try:
        stands = checkpoints.standing(checkpoint)
        if stands.data is not None:  # an imported model has seen none
            data.set_state(stands.data)
        if fresh:
            return initial_state(trainer), None, checkpoint
        if stands.weights_only:
            return state_of_weights(trainer, stored.folder, checkpoint), checkpoint, checkpoint
        state, _ = checkpoints.restore(checkpoint, trainer.abstract, trainer.layout)
        return state, checkpoint, checkpoint
    finally:
        checkpoints.close()


def _of_sublayers(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the gradient norm, and the update over the parameter norm where it was taken, of every sublayer [S]."""
    profile = {"grad_norm": np.asarray(values["grad"].sublayers)}
    if "update" in values:
        size = np.maximum(np.asarray(values["param"].sublayers), 1e-30)
        profile["update_ratio"] = np.asarray(values["update"].sublayers) / size
    return profile


def change(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a resolved config with other values.

    What was derived is derived anew, and what only the old residual kind had goes back to its default.

    Raises:
        UserError: an override of what decides the batches, or values that do not go together.
    """
    for name in overrides:
        if name.startswith(_BATCHES) and name not in _HARMLESS:
            raise UserError(f"{name}: decides the batches, and a replay feeds the run's own; allowed: other fields")
    if not overrides:
        return config
    changed = configs.change(config, overrides)
    assert config.model.vocab_size is not None
    return configs.resolve(changed, changed.model.vocab_size or config.model.vocab_size)


def batches_left_out(events: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return {completed steps: batches left out after them}, of the rewinds whose steps are still part of the run."""
    out: dict[int, int] = {}
    for event in events:
        if event["event"] == "rewind":
            to = int(event["to"])
            out = {step: count for step, count in out.items() if step < to} | {to: int(event["skipped_batches"])}
    return out


def standing(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events of spikes and non-finite steps that no rewind undid."""
    out: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "rewind":
            out = [before for before in out if before["step"] <= event["to"]]
        elif event["event"] in ("spike", "nonfinite"):
            out.append(event)
    return out


def render(result: Replay) -> str:
    """Return the text that the command prints."""
    lines = [f"step {result.step}"]
    for name in _LOGGED:
        lines.append(f"  {name:<12} {result.metrics[name]!r:<22}{_compared(result, name)}".rstrip())
    if result.event is not None:
        same = result.event.get("batch", {}).get("hash")
        lines.append(f"  event        {result.event['event']}, cause {result.event['cause']}")
        if same is not None:
            lines.append(
                f"  batch        {result.batch_hash} ({'the' if same == result.batch_hash else 'NOT the'} event's)"
            )
    if result.event is None or result.event.get("batch") is None:
        lines.append(f"  batch        {result.batch_hash}")
    if result.nan is not None:
        head, *rest = result.nan or ["none, in the loss and the gradient"]
        lines += [f"  first NaN    {head}", *(f"               {line}" for line in rest)]
    lines += ["", "profile over sublayers (gains and activations: forward pass on this batch, weights before the step)"]
    names = list(result.profile)
    size = len(result.profile["grad_norm"])
    rows = [["k", "sublayer", *names]]
    for k in range(size):
        words = f"{'feed-forward' if k % 2 else 'attention'} of block {k // 2}"
        values = [result.profile[name][k] for name in names]
        rows.append(
            [
                str(k),
                words,
                *("–" if n == "logit_max" and k % 2 else f"{x:.4g}" for n, x in zip(names, values, strict=True)),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if n == 1 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    lines += ["", "documents of the batch (row: where it begins)"]
    lines += [f"  {place['row']:>3}: {place['document']}, offset {place['offset']}" for place in result.documents]
    if result.differences is not None:
        lines.append("")
        if result.differences:
            lines.append(f"DIFFERS from the run's log in {', '.join(result.differences)}")
        else:
            lines.append("equal to the run's log, bit for bit")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code, 1 where the log was not reproduced. Raises UserError."""
    parser = cli.Parser(
        description="Replay a step of a run: its loss, gradient norm and profile over sublayers.",
        example="{prog} runs/a --step 400 --config.optimizer.lr=1e-3",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", required=True, type=int, help="the step to replay")
    parser.add_argument("--from", dest="first", type=int, metavar="K", help="the first step to replay")
    parser.add_argument("--rows", type=int, metavar="R", help="rows of the batch for the forward measures; 0: all")
    parser.add_argument("--nan", action="store_true", help="name the first operation of the step that gives a NaN")
    options, rest = parser.parse_known_args(arguments)
    if options.rows is not None and options.rows < 0:
        raise UserError(f"--rows: given {options.rows}, allowed: 0 (all) or more")
    given = cli.overrides(rest, parser)
    take_cores_of(remote.local_copy(options.run))
    result = replay(
        options.run, options.step, first=options.first, rows=options.rows, overrides=given, nan=options.nan, say=print
    )
    print(render(result))
    return 1 if result.differences else 0


def take_cores_of(run: Path) -> None:
    """Bind this process to as many cores as the run had, where its summary tells and there are as many.

    An arm of a grid has a share of the machine's cores. Once jax is loaded it is too late, and nothing is done.
    """
    summary = run / "summary.json"
    if "jax" in sys.modules or not hasattr(os, "sched_setaffinity") or not summary.is_file():
        return
    cores, usable = read_json(summary).get("cores"), sorted(os.sched_getaffinity(0))
    if cores and cores < len(usable):
        os.sched_setaffinity(0, usable[:cores])


def _read(run: str | Path) -> _Stored:
    folder = remote.local_copy(run)
    if not (folder / "config.json").is_file():
        raise UserError(f"{run}: not a run folder (it has no config.json)")
    config = configs.from_json((folder / "config.json").read_text(), remote.path(run) / "config.json")
    rows = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not rows:
        raise UserError(f"{run}: has not logged a step, so there is none to replay")
    events = read_jsonl(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    return _Stored(remote.path(run), config, {int(row["step"]): row for row in rows}, events)


def _same_state(abstract: Any, config: Config, mesh: Any) -> bool:
    """Return whether a state of ``config`` has the shapes of ``abstract``."""
    import jax

    from mhc.train.step import Trainer

    ours = Trainer(config, mesh).abstract

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    structures: list[Any] = [jax.tree.structure(tree) for tree in (ours, abstract)]
    return bool(structures[0] == structures[1] and shapes(ours) == shapes(abstract))


def _beginning(start: int | None, fresh: bool, config: Config, changes: Mapping[str, tuple[Any, Any]]) -> str:
    changed = "".join(f"\n  {name}: {before!r} -> {after!r}" for name, (before, after) in changes.items())
    if start is not None:
        return f"restored the checkpoint of step {start}{changed}"
    why = "no checkpoint fits the changed fields" if fresh else "there is no checkpoint before it"
    source = f" and {config.train.init_from}" if config.train.init_from else ""
    return f"initialised afresh from seed {config.seed.init}{source}: {why}{changed}"


def _skip(data: Any, batches: int) -> None:
    for _ in range(batches):
        next(data)


def _forward(
    probes: Any, trainer: Any, state: Any, batch: Mapping[str, np.ndarray], rows: int | None, config: Config
) -> dict[str, np.ndarray]:
    """Return measures of the forward pass, one value a sublayer; attention's own are given for its sublayers alone."""
    import jax

    take = config.monitor.probe_sequences if rows is None else rows or None
    part = {name: batch[name][:take] for name in probes.BATCH_FIELDS}
    seen = jax.device_get(probes.compile_probe(trainer.definition, trainer.mesh)(state.params, part))
    size = len(seen["activation/residual_rms"])
    attention = np.full(size, np.nan)
    attention[::2] = seen["activation/attention_logit_max"]
    return {
        "residual_rms": np.asarray(seen["activation/residual_rms"]),
        "out_rms": np.asarray(seen["activation/sublayer_out_rms"]),
        "logit_max": attention,
        # A topology without maps of streams has no gains.
        "forward_gain": np.asarray(seen.get("gain/forward_composite_mean", np.full(size, np.nan))),
        "backward_gain": np.asarray(seen.get("gain/backward_composite_mean", np.full(size, np.nan))),
    }


def _first_nan(trainer: Any, state: Any, batch: Any, completed: int) -> list[str]:
    """Return lines about the first NaN of a step, none where there is no NaN."""
    import jax.numpy as jnp

    from mhc.train.diagnose import finite_outputs, first_nan, sublayer_name
    from mhc.train.optimizer import map_paths

    weights: list[str] = []
    map_paths(lambda path, leaf: weights.append(path) if jnp.isnan(leaf).any() else None, state.params)
    if weights:
        return [f"in the weights before the step: {weights[0]} ({len(weights)} arrays with NaN)"]
    operation = first_nan(trainer, state.params, batch, completed)
    if operation is None:
        return []
    name, origin = operation
    head, *rest = origin.render()
    fine = np.asarray(finite_outputs(trainer, state.params, batch, completed))
    where = [] if fine.all() else [f"the first output that is not finite: {sublayer_name(int(np.argmin(fine)))}"]
    return [f"{name} pass: {head}", *rest, *where]


def _differences(
    logged: Mapping[str, Any], scalars: Mapping[str, float], sublayers: np.ndarray
) -> dict[str, tuple[Any, Any]]:
    """Return the metrics whose logged and replayed values are not equal; NaN equals NaN."""
    pairs: dict[str, tuple[Any, Any]] = {name: (logged[name], scalars[name]) for name in _LOGGED if name in logged}
    if "grad_norm_by_sublayer" in logged:  # written with five digits
        rounded = [float(f"{x:.4e}") for x in np.asarray(sublayers, np.float64)]
        pairs["grad_norm_by_sublayer"] = (logged["grad_norm_by_sublayer"], rounded)
    return {
        name: pair
        for name, pair in pairs.items()
        if not np.array_equal(np.asarray(pair[0], np.float64), np.asarray(pair[1], np.float64), equal_nan=True)
    }


def _compared(result: Replay, name: str) -> str:
    if result.differences is None:
        return ""
    return f"logged {result.differences[name][0]!r}" if name in result.differences else "= logged"


if __name__ == "__main__":
    cli.run_main(main)
