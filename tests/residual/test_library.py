"""Test the library as other people use it: the pages, to the word, the examples, HyperConnection in Flax's ways."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mhc import residual
from mhc.residual import HyperConnection
from tests.contracts.topologies import registry_restored

ROOT = Path(__file__).parents[2]
LIBRARY = ("residual", "kernels", "kind_table", "kinds", "rules", "errors", "rng")  # what it needs of mhc
FOREIGN = ("ml_collections", "grain", "orbax", "tensorflow_datasets", "tokenizers", "tensorboardX", "matplotlib")


def blocks(page: str) -> list[str]:
    """Return the blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget what a test registers, and the modules that did it."""
    modules = set(sys.modules)
    with registry_restored():
        yield
    for name in set(sys.modules) - modules:
        if name in ("ring", "ring_demo"):
            del sys.modules[name]


@pytest.mark.parametrize("page", [pytest.param("docs/residual_library.md", marks=pytest.mark.long), "README.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    assert "HyperConnection" in names


def test_eight_lines_wrap_a_module_and_train_it() -> None:
    """A script that knows the README alone trains a module."""
    script = """
import jax, optax
from flax import nnx
from mhc.residual import HyperConnection
model = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0)), HyperConnection(16, 0, n=4, rngs=nnx.Rngs(1))])
h, target = jax.random.normal(jax.random.key(0), (2, 8, 16))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
step = nnx.jit(nnx.value_and_grad(lambda m: ((m[1].collapse(m[1](m[1].expand(h), m[0])) - target) ** 2).mean()))
losses = [(loss, optimizer.update(model, grads))[0] for _ in range(20) for loss, grads in [step(model)]]
"""
    assert len(script.strip().splitlines()) == 8
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["losses"][-1] < 0.7 * names["losses"][0]


@pytest.mark.long
def test_the_page_on_adding_a_topology_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    """The page's files are written, and the rest of its code runs in order: it registers, trains and tests the kind."""
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    files = []
    for block in blocks("docs/adding_a_topology.md"):
        first = block.partition("\n")[0]
        if first.startswith("# ") and first.endswith(".py"):
            files.append(first.removeprefix("# "))
            (tmp_path / files[-1]).write_text(block)
        else:
            exec(compile(block, "docs/adding_a_topology.md", "exec"), names)
    assert files == ["ring.py", "ring_demo.py", "ring_grid.py"]
    assert "ring" in residual.kinds()
    assert names["losses"][-1] < names["losses"][0]
    from mhc import cli  # what --config ring_demo.py does

    config = cli.load_config(str(tmp_path / "ring_demo.py"), [])
    assert config.residual.kind == "ring"


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        pytest.param(
            "mlp_classifier",
            ["--steps", "60", "--depth", "2"],
            r"mhc: (9\d|100)\.\d % of unseen points right",
            marks=pytest.mark.long,
        ),
        pytest.param("attention_block", ["--steps", "60"], r"step   59  loss 0\.[0-4]", marks=pytest.mark.long),
        pytest.param(
            "linen_classifier",
            ["--steps", "60", "--depth", "2"],
            r"mhc: (8[5-9]|9\d)\.\d % of unseen points right .*\n.* moved by up to 0\.[1-9]",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_example_learns(program: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{program}.py"))["main"](arguments)
    out = capsys.readouterr().out
    assert re.search(said, out), out


@pytest.mark.parametrize("program", ["mlp_classifier", "attention_block", "linen_classifier"])
def test_an_example_explains_itself_and_a_mistake_is_one_line(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(ROOT / "examples" / f"{program}.py")

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        return (ended.value.code, *capsys.readouterr())

    code, out, _ = run("--help")
    assert code == 0 and f"example:\n  python examples/{program}.py --kind hc --steps 200\n" in out
    for arguments, words in (
        (["--kind", "mhcc"], "argument --kind: invalid choice: 'mhcc'"),
        (["--steps", "0"], "--steps: given 0, allowed: 1 or more"),
        (["--step", "3"], "unknown argument --step (did you mean --steps?)"),
    ):
        code, _, err = run(*arguments)
        assert code == 2 and words in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_importing_the_library_pulls_in_jax_and_flax_only() -> None:
    code = "import sys, mhc.residual; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    assert {"jax", "flax", "mhc.residual.functional"} <= loaded
    assert not [name for name in loaded if name.split(".")[0] in FOREIGN and not name.startswith("orbax")]
    ours = {name for name in loaded if name.split(".")[0] == "mhc"}
    assert not [name for name in ours if name.split(".")[1:2] not in ([], *([room] for room in LIBRARY))]


# HyperConnection ------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 8, 2


class Net(nnx.Module):
    """Runs linear sublayers between connections of a kind."""

    def __init__(self, kind: str, rngs: nnx.Rngs, **options: Any):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH)])
        options |= {"kind": kind, "sublayers": DEPTH}
        self.connections = nnx.List([HyperConnection(WIDTH, k, rngs=rngs, **options) for k in range(DEPTH)])

    def __call__(self, h: jax.Array) -> jax.Array:
        x = self.connections[0].expand(h)
        for connection, layer in zip(self.connections, self.layers, strict=True):
            x = connection(x, layer)
        return self.connections[-1].collapse(x)


def phi_of(connection: HyperConnection) -> jax.Array:
    return vars(connection.connection)["phi"][...]


def data() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(5, WIDTH)), jnp.float32) for _ in range(2))  # type: ignore[return-value]


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, h: jax.Array, target: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jnp.mean((model(h) - target) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("kind", residual.kinds())
def test_every_kind_trains_in_the_usual_way(kind: str) -> None:
    model = Net(kind, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, *data())) for _ in range(10)]
    assert losses[-1] < losses[0]
    if kind not in ("plain", "denseformer"):  # whose connections have no parameters
        assert any(
            "connection" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(nnx.state(model))
        )


def test_the_plain_kind_is_a_plain_residual() -> None:
    model, (h, _) = Net("plain", nnx.Rngs(0)), data()
    expected = h
    for layer in model.layers:
        expected = expected + layer(expected)
    np.testing.assert_allclose(model(h), expected, rtol=1e-5)


def test_connections_of_one_model_draw_different_parameters() -> None:
    model = Net("mhc", nnx.Rngs(0), init="fanin")
    one, two = (phi_of(model.connections[k]) for k in (0, 1))
    assert np.abs(one - two).max() > 0.1
    again = Net("mhc", nnx.Rngs(0), init="fanin")
    np.testing.assert_array_equal(phi_of(again.connections[0]), one)


@pytest.mark.parametrize("rngs", [nnx.Rngs(0), nnx.Rngs(params=1), jax.random.key(2)], ids=["default", "params", "key"])
def test_rngs_of_every_sort(rngs: Any) -> None:
    connection = HyperConnection(WIDTH, 1, init="v4", collapse="head", rngs=rngs)
    assert 0.01 < float(jnp.std(phi_of(connection))) < 0.03
    h, _ = data()
    assert connection.collapse(connection.expand(h)).shape == h.shape


def test_the_sublayer_may_be_any_callable_and_takes_further_arguments() -> None:
    connection, (h, other) = HyperConnection(WIDTH, 0, rngs=nnx.Rngs(0)), data()
    x = connection.expand(h)
    u, context = connection.read(x)
    expected = connection.write(x, u * other + 2.0, context)
    np.testing.assert_array_equal(connection(x, lambda u, a, *, b: u * a + b, other, b=2.0), expected)


def test_what_is_no_output_is_refused() -> None:
    connection, (h, _) = HyperConnection(WIDTH, 0, rngs=nnx.Rngs(0)), data()
    x = connection.expand(h)
    with pytest.raises(TypeError, match=r"must return one array, got tuple; .* connection\.read and connection\.write"):
        connection(x, lambda u: (u, u))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"the shape of its input \(5, 8\), got \(5, 1\)"):
        connection(x, lambda u: u[:, :1])
    with pytest.raises(ValueError, match=r"must be \[\.\.\., N=4, D=8\], got float32\[5, 8\]: expand first"):
        connection(h, lambda u: u)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "mhcc"}, "unknown residual kind 'mhcc'"),
        ({"kind": "mhc_lite", "n": 6}, "n: given 6, allowed: from 1 to 5 .* permutation"),
        ({"kind": "hc", "init": "home"}, "init: given 'home', allowed: hc"),
        ({"collapse": "product"}, "collapse: given 'product', allowed: mean or sum or head"),
        ({"sinkhorn": "papre"}, "sinkhorn: given 'papre', allowed: one of paper, deepseek"),
        ({"iters": 0}, "iters: given 0, allowed: an int >= 1"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HyperConnection(WIDTH, 0, rngs=nnx.Rngs(0), **options)


def test_a_width_split_over_devices_is_not_gathered() -> None:
    """(N, D) is contracted without flattening, so under tensor parallelism the streams stay where they are."""
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    topology = residual.build("mhc", 64, n=4, rngs=nnx.Rngs(0))
    connection = topology.connection(0, rngs=nnx.Rngs(0))
    graph, state = nnx.split(connection)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        connection = nnx.merge(graph, state)
        u, context = connection.read(x)
        return jnp.sum(connection.write(x, jnp.tanh(u), context) ** 2)

    layouts = (
        jax.tree.map(
            lambda leaf: jax.NamedSharding(mesh, spec(None, "tensor", None) if leaf.ndim == 3 else spec()), state
        ),
        jax.NamedSharding(mesh, spec(None, None, "tensor")),
    )
    x = jnp.zeros((16, 4, 64))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)), in_shardings=layouts).lower(state, x).compile()
    text = compiled.as_text() or ""
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_a_connection_can_be_exported_with_a_symbolic_batch() -> None:
    """Shapes that are symbols broadcast as numbers do."""
    from jax import export

    connection = HyperConnection(8, n=2, kind="mhc", k=0, sublayers=2, collapse="head", rngs=nnx.Rngs(0))

    def run(h: jax.Array) -> jax.Array:
        return connection.collapse(connection(connection.expand(h), jnp.tanh))

    (batch,) = export.symbolic_shape("b")
    exported = export.export(jax.jit(run))(jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    h = jnp.linspace(-1.0, 1.0, 24).reshape(3, 8)
    np.testing.assert_allclose(exported.call(h), run(h), rtol=1e-6)
