"""Test that a kind from elsewhere which breaks the protocol, or whose code raises, is one line at the start."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mhc import cli, kinds, residual
from mhc.config import Config, from_config_dict, resolve
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.residual import HyperConnection, Kind, KindError, Parameter, StreamConnection, StreamTopology
from mhc.residual import TokenMaps as Maps
from tests.contracts.topologies import BUILDERS, registry_restored

WIDTH = 16


class GoodConnection(StreamConnection):
    """Computes fixed maps. Parameters: gain [N], which weighs the writes."""

    def __init__(self, k: int | jax.Array, n: int):
        self.n = n
        self.gain = nnx.Param(jnp.ones((n,), jnp.float32))

    def token_maps(self, x: jax.Array) -> Maps:
        tokens = x.shape[:-2]

        def spread(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf.reshape(*leaf.shape, *(1,) * len(tokens)), (*leaf.shape, *tokens))

        return Maps(spread(jnp.full((self.n,), 1.0 / self.n)), spread(self.gain[...]), spread(jnp.eye(self.n)))


class Good(StreamTopology):
    """Keeps the protocol."""

    connections: type[GoodConnection] = GoodConnection

    def __init__(self, width: int, *, rngs: Any = None, n: int | None = None, collapse: str | None = None):
        super().__init__(width, 4 if n is None else n, collapse or "mean", rngs=rngs)

    def connection(self, k: int | jax.Array, *, rngs: Any = None) -> StreamConnection:
        return self.connections(k, self.n)

    def map_multiplies(self) -> int:
        return 0


KIND = Kind("theirs", inits=(), collapses=("mean",), parameters={"gain": Parameter(("maps",))})


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    with registry_restored():
        yield


def topology(**methods: Any) -> type[Good]:
    """Return the builder of Good with other methods or attributes."""
    return type("Broken", (Good,), methods)


def connection(**methods: Any) -> type[Good]:
    """Return the builder of Good whose connections have other methods."""
    return topology(connections=type("BrokenConnection", (GoodConnection,), methods))


def config_of(**fields: Any) -> Config:
    base = {"model": {"layers": 2, "width": WIDTH, "vocab_size": 32}, "attention": {"heads": 2}}
    return resolve(from_config_dict({**base, "residual": {"kind": "theirs"}, **fields}), 32)


def boom(*arguments: Any, **named: Any) -> Any:
    raise KeyError("boom")


def typed(self: Any, state: Any, y: Any, context: Any) -> Any:
    return StreamConnection.write(self, state, y, context).astype(jnp.float16)


COUNT = itertools.count()


def by_name(self: Any, context: Any) -> Any:
    return {f"measure {next(COUNT)}": jnp.ones(context.pre.shape[1:])}


def beginning(more: Callable[[Any], None]) -> Callable[..., None]:
    """Return the __init__ of a connection that does something more."""

    def __init__(self: Any, k: int | jax.Array, n: int) -> None:
        GoodConnection.__init__(self, k, n)
        more(self)

    return __init__


def undeclared(module: Any) -> None:
    module.other = nnx.Param(jnp.ones(3))


def square(module: Any) -> None:
    module.gain = nnx.Param(jnp.ones((module.n, module.n)))


def narrow(module: Any) -> None:
    module.gain = nnx.Param(jnp.ones(module.n, jnp.bfloat16))


# What breaks -> (the builder, the words that say so).
BREAKS: dict[str, tuple[Callable[..., Any], str]] = {
    "the builder raises": (boom, "its builder failed (FILE): KeyError: boom"),
    "the builder takes no width": (lambda: None, "its builder failed: TypeError: "),
    "the builder gives nothing": (lambda width, rngs: None, "its builder must give a ResidualTopology, got NoneType"),
    "no streams": (topology(n=property(lambda self: None, lambda self, n: None)), "`n` must be the number of streams"),
    "expand raises": (topology(expand=boom), "`expand` failed (FILE): KeyError: boom"),
    "expand forgets a token": (
        topology(expand=lambda self, h: StreamTopology.expand(self, h)[1:]),
        "the state has a leaf of shape [4, 7, 4, 16], whose first axes must be the tokens' [5, 7]",
    ),
    "expand has streams first": (
        topology(expand=lambda self, h: jnp.moveaxis(StreamTopology.expand(self, h), -2, 0)),
        "the state has a leaf of shape [4, 5, 7, 16], whose first axes must be the tokens' [5, 7]",
    ),
    "connection raises": (topology(connection=boom), "`connection` failed (FILE): KeyError: boom"),
    "connection gives nothing": (
        topology(connection=lambda self, k, rngs: None),
        "`connection` must give a Connection, got NoneType",
    ),
    "read raises": (connection(token_maps=boom), "`read` failed (FILE): KeyError: boom"),
    "read gives one thing": (
        connection(read=lambda self, state: state[..., 0, :]),
        "`read` must give (the sublayer's input, what `write` needs), got",
    ),
    "read gives another width": (
        connection(read=lambda self, state: (state[..., 0, :3], None)),
        "`read` must give float32[5, 7, 16], with the tokens' axes [5, 7] first, got float32[5, 7, 3]",
    ),
    "read gives another dtype": (
        connection(read=lambda self, state: (state[..., 0, :].astype("float16"), None)),
        "`read` must give float32[5, 7, 16], with the tokens' axes [5, 7] first, got float16[5, 7, 16]",
    ),
    "write raises": (connection(write=boom), "`write` failed (FILE): KeyError: boom"),
    "write gives another dtype": (
        connection(write=typed),
        "`write` must keep the state float32[5, 7, 4, 16], got float16[5, 7, 4, 16]",
    ),
    "write gives another shape": (
        connection(write=lambda self, state, y, context: state[..., :1, :]),
        "`write` must keep the state float32[5, 7, 4, 16], got float32[5, 7, 1, 16]",
    ),
    "write gives another structure": (
        connection(write=lambda self, state, y, context: (state, y)),
        "`write` must keep the state's structure float32[5, 7, 4, 16], got (float32[5, 7, 4, 16], float32[5, 7, 16])",
    ),
    "settle raises": (topology(settle=boom), "`settle` failed (FILE): KeyError: boom"),
    "settle gives another structure": (
        topology(settle=lambda self, state: [state]),
        "`settle` must keep the state's structure",
    ),
    "each shows nothing": (
        topology(each=lambda self, state, f: state),
        "`each` must show every leaf but scalars once: 1, it shows 0",
    ),
    "each gives nothing": (topology(each=lambda self, state, f: f(state)[0]), "`each` must keep the state "),
    "hand_on raises": (topology(period=1, hand_on=boom), "`hand_on` failed (FILE): KeyError: boom"),
    "held loses something": (
        topology(period=1, held=lambda self, state: ((), state[..., :1, :])),
        "`joined` of `held` must keep the state ",
    ),
    "no period": (topology(period=0), "`period` must be None or a number of blocks of at least 1, got 0"),
    "collapse gives streams": (
        topology(collapse=lambda self, state: state),
        "`collapse` must give float32[5, 7, 16], with the tokens' axes [5, 7] first, got float32[5, 7, 4, 16]",
    ),
    "no streams to show": (
        topology(streams=lambda self, state: state[..., 0, :]),
        "`streams` must give shape [5, 7, 4, 16], with the tokens' axes [5, 7] first, got float32[5, 7, 16]",
    ),
    "maps with the tokens last": (
        connection(maps=lambda self, context: context),
        "pre of `maps` must give shape [5, 7, 4], with the tokens' axes [5, 7] first, got float32[4, 5, 7]",
    ),
    "maps that are none": (
        connection(maps=lambda self, context: context.pre),
        "`maps` must give Maps(pre, post, res) or None",
    ),
    "measures of no token": (
        connection(measures=lambda self, context: {"gain": self.gain[...]}),
        "'gain' of `measures` must give shape [5, 7], with the tokens' axes [5, 7] first, got float32[4]",
    ),
    "measures by another name": (
        connection(measures=by_name),
        "`measures` must have the same names in every sublayer, got",
    ),
    "no count of multiplications": (
        topology(map_multiplies=lambda self: 0.5),
        "`multiplies` must give an int, got float",
    ),
    "multiplies is missing": (
        topology(multiplies=residual.ResidualTopology.multiplies),
        "`multiplies` failed (FILE): NotImplementedError",
    ),
}

# What a connection of a number of one's own allows, and a decoder, which stacks connections, does not.
STACKED: dict[str, tuple[Callable[..., Any], str]] = {
    "a number that is looked at": (
        topology(connection=lambda self, k, rngs: GoodConnection(k, self.n) if k == 0 else Good.connection(self, k)),
        "`connection` failed (FILE): TracerBoolConversionError: ",
    ),
    "a parameter that is not declared": (
        connection(__init__=beginning(undeclared)),
        "the parameter 'other' is not among the Kind's parameters",
    ),
    "a parameter of other axes": (
        connection(__init__=beginning(square)),
        "the parameter 'gain' has shape [4, 4], declared: (maps)",
    ),
    "a parameter of another dtype": (
        connection(__init__=beginning(narrow)),
        "the parameter 'gain' must be float32, got bfloat16",
    ),
}


def check_line(message: str, words: str) -> None:
    """Check for one line that names the kind and has the words; FILE stands for this file and a line of it."""
    assert "\n" not in message
    assert message.startswith("residual kind 'theirs'"), message
    head, place, tail = words.partition("(FILE)")
    if place and "NotImplementedError" not in tail:
        assert f"({__file__}, line " in message, message
        assert head in message and tail in message, message
    else:
        assert head.strip() in message and tail in message, message


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_one_line_in_a_connection_and_in_a_decoder(name: str) -> None:
    builder, words = BREAKS[name]
    residual.register(KIND, builder)
    with pytest.raises(KindError) as caught:
        HyperConnection(WIDTH, 0, kind="theirs", rngs=nnx.Rngs(0))
    check_line(str(caught.value), words)
    with pytest.raises(UserError) as caught_by_user:
        DecoderDefinition(config_of(model={"layers": 2, "width": WIDTH, "vocab_size": 32, "dtype": "float32"}))
    check_line(str(caught_by_user.value), words)


@pytest.mark.parametrize("name", STACKED)
def test_what_a_stack_of_blocks_asks_more_is_one_line_too(name: str) -> None:
    builder, words = STACKED[name]
    residual.register(KIND, builder)
    with pytest.raises(KindError) as caught:
        DecoderDefinition(config_of())
    check_line(str(caught.value), words)


def test_a_state_that_keeps_float32_alone_breaks_in_bfloat16() -> None:
    """It serves models in float32, and is refused where the decoder computes in bfloat16."""

    def widen(self: Any, state: Any, y: Any, context: Any) -> Any:
        return StreamConnection.write(self, state, y, context).astype(jnp.float32)

    residual.register(KIND, connection(write=widen))
    HyperConnection(WIDTH, 0, kind="theirs", rngs=nnx.Rngs(0))
    narrow = config_of(model={"layers": 2, "width": WIDTH, "vocab_size": 32, "dtype": "bfloat16"})
    with pytest.raises(KindError, match=r"`write` must keep the state bfloat16\[5, 7, 4, 16\], got float32"):
        DecoderDefinition(narrow)


def test_a_good_kind_is_taken_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, builder in ((KIND, Good), *BUILDERS.values()):
        residual.register(kind, builder)
        HyperConnection(WIDTH, 0, kind=kind.name, sublayers=4, rngs=nnx.Rngs(0))
    DecoderDefinition(config_of())
    calls: list[int] = []
    monkeypatch.setattr(residual.contract._Contract, "run", lambda self: calls.append(1))
    HyperConnection(WIDTH, 3, kind="theirs", rngs=nnx.Rngs(1))
    DecoderDefinition(config_of())
    assert not calls
    HyperConnection(WIDTH, 3, kind="theirs", n=2, rngs=nnx.Rngs(1))
    assert calls


def test_kinds_of_this_project_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract tests check those kinds; errors of their builders pass unchanged."""
    monkeypatch.setattr(residual.contract._Contract, "run", boom)
    HyperConnection(WIDTH, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs N to be a power of two"):
        residual.protocol.builder("kromhc")(8, n=3, rngs=nnx.Rngs(0)).multiplies(0)


def test_a_check_that_raises_is_one_line() -> None:
    residual.register(kinds.Kind("theirs", check=boom), Good)
    with pytest.raises(UserError, match=r"^residual\.kind=theirs: its check failed \(.*, line \d+\): KeyError: boom$"):
        from_config_dict({"residual": {"kind": "theirs"}})


def test_a_mistake_that_a_builder_tells_itself_is_passed_on() -> None:
    """A UserError is a line already; a ValueError of the builder's own is reported with the kind."""

    def odd(width: int, *, rngs: Any, n: int | None = None) -> Any:
        if n == 3:
            raise UserError("n: given 3, allowed: an even number")
        raise ValueError("theirs needs sublayers")

    residual.register(KIND, odd)
    with pytest.raises(UserError, match=r"^n: given 3, allowed: an even number$"):
        residual.build("theirs", WIDTH, n=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^residual kind 'theirs'.*: its builder failed \(.*ValueError: theirs needs"):
        residual.build("theirs", WIDTH, rngs=nnx.Rngs(0))


def test_a_program_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their_module.py").write_text(
        "from mhc import residual\n"
        "def build(width, *, rngs, n=None):\n"
        "    raise OSError('no such table')\n"
        "residual.register(residual.Kind('theirs'), build)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    from mhc.train.__main__ import main

    demo = Path(__file__).parents[2] / "configs" / "demo.py"
    fields = ("module=their_module", "kind=theirs")
    with pytest.raises(SystemExit) as left:
        cli.run_main(main, ["--config", str(demo), "--dry_run", *[f"--config.residual.{field}" for field in fields]])
    sys.modules.pop("their_module", None)
    assert left.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert lines == [
        "error: residual kind 'theirs' of module their_module: its builder failed "
        f"({tmp_path}/their_module.py, line 3): OSError: no such table"
    ]
