"""Test the measures of ``bench`` in small: their yardsticks, their figures, and what their command lines refuse."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import compile as compile_bench
from bench import overhead, probes, timing, traffic
from bench.model import Sizes, random_batch
from bench.reference import einsum, plain_step
from mhc.config import Config
from mhc.errors import UserError
from mhc.residual import functional
from tests.small import relative_error
from tpu import hlo, xla_process
from tpu.slices import Slice

SMALL = Sizes(width=16, blocks=1, heads=2, length=8, batch=2, vocabulary=17)
FLAGS = [flag for name in ("width", "heads", "length", "batch") for flag in (f"--{name}", str(getattr(SMALL, name)))]


# The yardsticks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hc", "mhc"])
def test_an_einsum_connection_is_that_of_the_reference(kind: str) -> None:
    with jax.enable_x64(True):
        rng, n, d = np.random.default_rng(0), 3, 5
        x = jnp.asarray(rng.normal(size=(2, 4, n, d)))
        shapes: dict[str, tuple[int, ...]] = {
            "hc": {"w_pre": (d,), "w_post": (d,), "w_res": (d, n), "alpha": (3,)}
            | {"b_pre": (n,), "b_post": (n,), "b_res": (n, n)},
            "mhc": {"phi": (n * d, 2 * n + n * n), "alpha": (3,), "bias": (2 * n + n * n,)},
        }[kind]
        params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
        maps = functional.hc_maps(x, params) if kind == "hc" else functional.mhc_maps(x, params)
        expected = functional.write(x, jnp.tanh(functional.read(x, maps.pre)), maps.post, maps.res)
        assert relative_error(einsum.CONNECTIONS[kind](x, params, jnp.tanh), expected) < 1e-12


def test_the_plain_step_learns_and_sees_no_later_token() -> None:
    sizes = plain_step.Sizes(width=16, blocks=2, heads=2, length=8, vocabulary=11)
    params = plain_step.initial(sizes, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 11)
    changed = tokens.at[:, 5:].set(0)
    out, other = plain_step.logits(params, tokens), plain_step.logits(params, changed)
    np.testing.assert_allclose(out[:, :5], other[:, :5], rtol=1e-6, atol=1e-6)
    assert not np.allclose(out[:, 5:], other[:, 5:])

    optimizer = plain_step.optimizer(100)
    step, carry = plain_step.make_step(optimizer), (params, optimizer.init(params))
    losses = []
    for _ in range(20):
        carry, loss = step(carry, tokens, tokens)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_the_plain_step_has_the_parameters_of_the_config() -> None:
    """Ours has a bias in each LayerNorm besides, 2L + 1 vectors of D."""
    from mhc.model.decoder import DecoderDefinition

    shape = plain_step.Sizes(SMALL.width, SMALL.blocks, SMALL.heads, SMALL.length, SMALL.vocabulary)
    theirs = plain_step.initial(shape, jax.random.key(0))
    ours = DecoderDefinition(SMALL.config("plain")).abstract()
    biases = (2 * SMALL.blocks + 1) * SMALL.width
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (ours, theirs)]
    assert sizes[0] - biases == sizes[1]


# The measures ---------------------------------------------------------------------------------------------------------


def test_turns_alternate_and_a_slower_function_is_slower() -> None:
    order: list[str] = []

    def function(name: str, seconds: float) -> Any:
        def run() -> None:
            order.append(name)
            time.sleep(seconds)

        return run

    samples = timing.interleaved({"a": function("a", 0.002), "b": function("b", 0.02)}, 3)
    assert order == ["a", "b"] * 4
    assert timing.ratio(samples["b"], samples["a"])["median"] > 2
    assert timing.ratio(samples["a"], samples["a"]) == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert timing.spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}


@pytest.mark.long
def test_overhead_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "overhead.json"
    flags = [*FLAGS, "--blocks", "1", "--widths", "8", "--tokens", "2,3", "--streams", "2", "--rounds", "2"]
    assert overhead.main(["--kinds", "plain,mhc", *flags, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["steps"]) == {"reference", "plain", "mhc"}
    assert set(figures["connections"]["8"]) == {"hc einsum", "mhc einsum", "plain", "mhc"}
    assert figures["steps"]["plain"]["of_plain"]["median"] == 1.0
    assert figures["connections"]["8"]["mhc"]["of_mhc"]["median"] == 1.0
    assert all(row["seconds"]["low"] > 0 for row in figures["steps"].values())
    assert "of_reference" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["frac", "attn_res", "kromhc", "gated_residual"])
def test_a_connection_of_any_state_runs(kind: str) -> None:
    out, (to_params, to_state) = overhead._connection(kind, 8, (2, 3), 4)()
    for leaf in jax.tree.leaves((out, to_params, to_state)):
        assert np.isfinite(leaf).all()
    assert any(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(to_state))


@pytest.mark.long
def test_compile_in_small(tmp_path: Path) -> None:
    file = tmp_path / "compile.json"
    flags = ["--blocks", "1", "--rounds", "1", *FLAGS]
    assert compile_bench.main(["--kinds", "plain,mhc", *flags, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["kinds"]
    assert rows["plain"]["1"]["of_first"]["median"] == 1.0
    row = {name: value["median"] for name, value in rows["mhc"]["1"].items()}
    assert row["total"] == pytest.approx(row["trace"] + row["compile"])
    assert row["of_first"] == pytest.approx(row["total"] / rows["plain"]["1"]["total"]["median"])


@pytest.mark.long
def test_probes_in_small(tmp_path: Path) -> None:
    file = tmp_path / "probes.json"
    flags = ["--blocks", "1", "--rounds", "2", "--probe_sequences", "2", *FLAGS]
    assert probes.main(["--kinds", "mhc", *flags, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["kinds"]["mhc"]
    assert all(figures[name]["seconds"]["median"] > 0 for name in ("off", "metrics", "norms", "probe"))
    assert figures["share"]["median"] > -1


# Traffic --------------------------------------------------------------------------------------------------------------


PROGRAM = """
%fused (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %s = bf16[2,4]{1,0} slice(%p), slice={[0:2], [0:4]}
}

ENTRY %main (x: bf16[8,4]) -> bf16[2,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[8,4]{1,0} negate(%x), metadata={op_name="jit(_step)/jvp(write)/mul"}
  ROOT %z = bf16[2,4]{1,0} fusion(%y), kind=kLoop, calls=%fused
}
"""


def outcome(config: Config, temporaries: int) -> xla_process.Outcome:
    """Return the outcome of a step whose bytes are 1000 and 10 a block, of plain 1000 and 5 a block."""
    moved = 1000.0 + config.model.layers * (5 if config.residual.kind == "plain" else 10)
    return xla_process.Outcome(hlo.Memory(0, 0, temporaries), PROGRAM, None, {}, 0, 0.0, moved, 1.0, 1.0, 0)


def test_traffic_is_the_difference_of_two_depths() -> None:
    seen: list[tuple[str, int, bool, bool]] = []

    def compiled(config: Config, slice_: Slice, plan: bool) -> xla_process.Outcome:
        assert str(slice_) == "v5e:1x1"
        seen.append((config.residual.kind, config.model.layers, config.model.scan, plan))
        return outcome(config, 100 if config.residual.kind == "plain" else 150)

    sizes = traffic.Sizes(width=16, heads=2, length=8, batch=2, vocabulary=16, scanned=6, scanned_vocabulary=32)
    figures = traffic.measure(["plain", "mhc"], sizes, Slice("v5e", "1x1"), plan=False, compile_step=compiled)
    assert seen == [
        (kind, *step) for kind in ("plain", "mhc") for step in ((2, False, False), (4, False, False), (6, True, True))
    ]
    plain, mhc = figures["kinds"]["plain"], figures["kinds"]["mhc"]
    assert (plain["block"]["bytes"], mhc["block"]["bytes"], mhc["block"]["of_first"]) == (5.0, 10.0, 2.0)
    assert (mhc["scanned"]["temporaries"], mhc["scanned"]["of_first"]) == (150, 1.5)
    assert figures["counted_by"] == "xla"


def test_a_step_that_does_not_fit_is_an_error_of_the_users() -> None:
    def compiled(config: Config, slice_: Slice, plan: bool) -> xla_process.Outcome:
        return outcome(config, 0)._replace(memory=None)

    sizes = traffic.Sizes(width=16, heads=2, length=8, batch=2, vocabulary=16, scanned=0)
    with pytest.raises(UserError, match="plain, 2 blocks unrolled: it does not fit v5e:1x1"):
        traffic.measure(["plain"], sizes, Slice("v5e", "1x1"), plan=True, compile_step=compiled)


# Command lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (traffic, ["--kinds", "plain,mch"], r"--kinds: 'mch', allowed: .* \(did you mean mhc\?\)"),
        (traffic, ["--blocks", "4,2"], "--blocks: '4,2', allowed: two numbers, the smaller first"),
        (traffic, ["--topology", "v5x:1x1"], "--topology: 'v5x:1x1'"),
        (overhead, ["--kinds", "mhc,mhc"], "--kinds: mhc is named twice"),
        (overhead, ["--tokens", "8"], "--tokens: '8', allowed: two whole numbers B,T"),
        (overhead, ["--heads", "7"], "--heads: 7, allowed: a divisor of --width 512"),
        (compile_bench, ["--blocks", "12,x"], "--blocks: '12,x', allowed: whole numbers from 1"),
        (compile_bench, ["--rounds", "0"], "--rounds: 0, allowed: an int >= 1"),
        (probes, ["--probe_sequences", "9"], "--probe_sequences: 9, allowed: up to --batch 8"),
        (probes, ["--json", "nowhere/x.json"], "--json: cannot write nowhere/x.json"),
    ],
)
def test_a_mistake_is_one_line(program: Any, flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        program.main(flags)


def test_batches_have_the_shape_of_the_config() -> None:
    batch = random_batch(SMALL.config("plain"))
    assert {leaf.shape for leaf in batch.values()} == {(SMALL.batch, SMALL.length)}
    assert batch["tokens"].max() < SMALL.vocabulary
