"""Plant each fault of the table in docs/stability.md, and see its symptom where the table says to look."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import config as configs
from mhc.config import Config
from mhc.data import tokenizers
from mhc.eval.common.generator import Generator
from mhc.eval.windtunnel import signals
from mhc.model.moe import route
from mhc.model.sampling import Sampling
from mhc.monitor import guard
from mhc.monitor.phases import Phases
from mhc.monitor.probes import compile_probe
from mhc.sharding import path_of
from mhc.train.diagnose import first_nonfinite
from mhc.train.record import router_summary
from mhc.train.step import Faults, Trainer, balanced
from tests.small import LENGTH, VOCAB, by_path, definition, initial, packed, random_params, small, trainer

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, list[str]]:
    """Return {test: cells} of the fault table."""
    section = (ROOT / "docs" / "stability.md").read_text("utf-8").split("## Fault table")[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[-1].strip(" |`"): row for row in cells}


def test_every_row_has_its_experiment_and_names_what_exists() -> None:
    """Programs are modules, fields are fields, and keys of the logs stand in the code that writes them."""
    table = rows()
    assert len(table) >= 10
    assert set(table) == {name.removeprefix("test_") for name in globals() if name.startswith("test_")} - {
        "every_row_has_its_experiment_and_names_what_exists"
    }
    known = set(configs.field_names())
    code = "".join(path.read_text("utf-8") for path in (ROOT / "mhc").rglob("*.py"))
    for name, row in table.items():
        assert len(row) == 4, name
        quoted = re.findall(r"`([^`]+)`", " ".join(row[1:3]))
        assert any(text in known for text in quoted) or "eval." in row[1], name
        for text in quoted:
            program = re.match(r"(eval\.\w+)", text)
            if program:
                assert importlib.util.find_spec(program[1]), text
                options = re.findall(r"--(\w+)", text)
                source = "".join(path.read_text("utf-8") for path in (ROOT / "mhc" / "eval").rglob("*.py"))
                assert all(f'"--{option}"' in source for option in options), text
            elif re.fullmatch(r"\w+\.\w+", text) and not text.endswith((".jsonl", ".json", ".py")):
                assert text in known, text
            elif not text.endswith((".jsonl", ".py")) and " " not in text:
                written = re.sub(r"_(mean|max)$", "", text.split("/")[-1])
                assert written in code or text in code, text


# The faults -----------------------------------------------------------------------------------------------------------


def test_late_in_a_long_text() -> None:
    """The positions from the eighth on were never trained: their vectors are wild, and the trace's norms show where."""
    tokenizer = tokenizers.load("bytes")
    config = small(positions={"kind": "learned"}, model={"vocab_size": tokenizer.vocab_size})
    params = random_params(config)
    table = params["positions"]["table"]
    wild = {**params, "positions": {"table": table.at[8:].multiply(100.0)}}
    wild["head"] = {"kernel": jnp.zeros_like(params["head"]["kernel"])}  # all tokens alike, so that the text goes on
    made = Generator(config, wild, tokenizer, Sampling(), batch_size=1, chunk=4, trace=True)
    trace = made.extend([[tokenizer.bos_id, 97]], LENGTH - 2, seed=3)[0].trace
    variance = {at + 1: seen["norm"] ** 2 / config.model.width for at, seen in enumerate(trace)}
    assert len(variance) > 9  # no stop token came before
    assert min(v for at, v in variance.items() if at >= 8) > 20 * max(v for at, v in variance.items() if at < 8)


def test_fine_tuning_forgets() -> None:
    """After steps on other data the loss on what was learned first has risen, and γ has moved."""
    config = small(optimizer={"lr": 3e-2})
    made = trainer(config)

    def stepping(stride: int, seed: int) -> dict[str, Any]:
        """Return rows that count on by ``stride``: each token tells the next."""
        batch = packed(8, seed, documents=False)
        start = np.random.default_rng(seed).integers(0, VOCAB, (8, 1))
        counting = ((start + stride * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
        weights = np.ones((8, LENGTH), np.float32)
        return {**batch, "tokens": counting[:, :-1], "targets": counting[:, 1:], "weights": weights}

    def held_out(params: Any, stride: int) -> float:
        sums = made.validate(params, {**stepping(stride, 99), "target_bytes": jnp.ones((8, LENGTH), jnp.int32)})
        return float(sums["nll"] / sums["weight"])

    state = made.begin(
        jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), initial(config), made.layout.params)
    )
    for seed in range(30):
        state, _ = made.step(state, stepping(1, seed))
    known, gamma = held_out(state.params, 1), by_path(state.params)["blocks/mlp/norm/scale"]
    for seed in range(30):
        state, _ = made.step(state, stepping(5, seed))
    assert known < 0.5 * math.log(VOCAB) and held_out(state.params, 1) > known + 1.0
    assert np.abs(by_path(state.params)["blocks/mlp/norm/scale"] - gamma).max() > 0.05


@functools.cache
def hyper() -> tuple[Config, Any]:
    """Return a config of hc with fixed maps, whose output is not normalised, and its compiled probe."""
    config = small("hc", residual={"n": 2, "dynamic": False}, norm={"final": False})
    return config, compile_probe(definition(config))


def mixing(matrix: np.ndarray, **writes: list[float]) -> Any:
    """Return parameters of ``hyper`` that mix the streams by a matrix in every sublayer and are random elsewhere.

    ``writes``: how much of a sublayer's output goes to each stream, by sublayer: attention, mlp.
    """
    config, _ = hyper()
    params = random_params(config, std=0.1)
    fixed: dict[str, np.ndarray] = {"b_res": matrix}
    fixed |= {f"{sublayer}_residual/b_post": np.array(to) for sublayer, to in writes.items()}

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        name = path_of(path)
        values = [value for end, value in fixed.items() if name.endswith(f"/{end}")]
        return jnp.broadcast_to(jnp.asarray(values[0], jnp.float32), leaf.shape) if values else leaf

    return jax.tree_util.tree_map_with_path(changed, params)


def probed(params: Any) -> dict[str, Any]:
    batch = {name: packed(4)[name] for name in ("tokens", "segment_ids", "positions")}
    return {"step": 0, **{name: np.asarray(leaf) for name, leaf in hyper()[1](params, batch).items()}}


def test_small_perturbations() -> None:
    """A change of one embedding by a thousandth comes out larger by the gain that the probe shows."""
    config, _ = hyper()
    tokens = packed(2)["tokens"]
    run = jax.jit(lambda params: definition(config).bind(params)(tokens))

    def change(params: Any) -> float:
        table = params["embed"]["table"]
        nudged = {**params, "embed": {"table": table.at[int(tokens[0, 0])].multiply(1.001)}}
        return float(jnp.linalg.norm(run(nudged) - run(params)))

    calm, wild = mixing(np.eye(2)), mixing(3.0 * np.eye(2))
    gain = float(probed(wild)["gain/forward_composite_mean"][-1])
    assert gain == pytest.approx(3.0**4, rel=1e-4)
    assert float(probed(calm)["gain/forward_composite_mean"][-1]) == pytest.approx(1.0, rel=1e-4)
    assert change(wild) > 0.2 * gain * change(calm)


def test_gain_grows() -> None:
    """Maps whose rows sum to 4 pass the guard's threshold, and the event is there."""
    watch = guard.ProbeWatch(hyper()[0].guard)
    assert "forward_gain" not in watch.update(probed(mixing(np.eye(2))))
    record = probed(mixing(np.full((2, 2), 2.0)))
    crossed = watch.update({**record, "step": 10})["forward_gain"]
    assert crossed["value"] == pytest.approx(4.0**4, rel=1e-4) and crossed["threshold"] == 100.0
    assert record["gain/composite_norm_max"][-1] > record["gain/composite_norm_max"][0]


def test_streams_collapse() -> None:
    """Under uniform maps streams that get different outputs are nearly one; the event comes below half the median."""
    apart, one = (
        probed(mixing(matrix, attention=[1.0, 0.0], mlp=[0.0, 1.0])) for matrix in (np.eye(2), np.full((2, 2), 0.5))
    )
    assert np.abs(one["mix/to_uniform_composite"]).max() < 1e-5 < apart["mix/to_uniform_composite"].min()
    assert one["stream/effective"][-1] < apart["stream/effective"][-1] - 0.1
    watch = guard.ProbeWatch(hyper()[0].guard)
    for step in range(guard.COLLAPSE_MIN_HISTORY):
        assert not watch.update({"step": step, "stream/effective": np.full(4, 2.5)})
    assert "effective_streams" in watch.update({"step": 9, "stream/effective": np.full(4, 1.2)})


def test_attention_logits_grow() -> None:
    """Queries ten thousand times as long pass the threshold, and put all attention on one key."""
    params = mixing(np.eye(2))
    watch = guard.ProbeWatch(hyper()[0].guard)
    core = params["blocks"]["attention"]["core"]
    sharp = {**core, "query": 1e4 * core["query"]}
    blocks = {**params["blocks"], "attention": {**params["blocks"]["attention"], "core": sharp}}
    before, after = probed(params), probed({**params, "blocks": blocks})
    assert not watch.update(before) and "attention_logit" in watch.update({**after, "step": 1})
    assert after["activation/attention_entropy"].max() < 0.2 * before["activation/attention_entropy"].min()


AT = 20


def tenfold(step: jax.Array, loss: jax.Array) -> jax.Array:
    return jnp.where(step == AT, 10.0 * loss, loss)


@functools.cache
def spiking() -> Trainer:
    """Return a trainer whose loss is ten times as large in one step, and which leaves such a step out."""
    settings = small(
        guard={"on_spike": "skip"}, monitor={"zscore_window": 16, "zscore_min_history": 12}, optimizer={"lr": 1e-4}
    )
    return Trainer(settings, trainer(small()).mesh, Faults(loss=tenfold))


def fresh(made: Trainer) -> Any:
    params = initial(small())
    return made.begin(jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), params, made.layout.params))


def test_loss_spike() -> None:
    """The step is flagged and left out, and no other is; its cause is that of a spike with no sign in the streams."""
    made = spiking()
    state, skipped = fresh(made), []
    for step in range(AT + 3):
        state, metrics = made.step(state, packed(8, step))
        if bool(metrics["skip"]):
            skipped.append(step)
    assert skipped == [AT]
    assert guard.cause(finite=True, loss_flag=True, grad_flag=False, grad_flag_before=False, active={}) == "loss_spike"


def test_nan() -> None:
    """A weight that is no number reaches no parameter, and the first tensor that shows it has its name."""
    made = spiking()
    state = fresh(made)
    out = state.params["blocks"]["attention"]["core"]["out"]
    core = {**state.params["blocks"]["attention"]["core"], "out": out.at[1, 0, 0, 0].set(jnp.nan)}
    blocks = {**state.params["blocks"], "attention": {**state.params["blocks"]["attention"], "core": core}}
    broken = {**state.params, "blocks": blocks}
    before = by_path(broken)
    params = jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), broken, made.layout.params)
    following, metrics = made.step(state._replace(params=params), packed(8))
    assert int(metrics["nonfinite"]) == 1 and not math.isfinite(float(metrics["loss"]))
    for path, leaf in by_path(following.params).items():
        np.testing.assert_array_equal(leaf, before[path])
    found = first_nonfinite(made, following.params, packed(8), 0, jax.device_get(metrics))
    assert found == "output of sublayer 2 (attention of block 1), forward"


def test_experts_idle() -> None:
    """An expert that the choice never takes has load 0, and the balance moves its bias up."""
    config = small(moe={"experts": 4})
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 4)), jnp.float32)

    def loads(bias: list[float]) -> dict[str, np.ndarray]:
        chosen = np.asarray(route(config, logits, jnp.asarray(bias))[0])
        return {"load": np.bincount(chosen.reshape(-1), minlength=4)[None], "balance": np.ones(1), "z": np.ones(1)}

    busy, idle = loads([0.0, 0.0, 0.0, 0.0]), loads([0.0, 0.0, -10.0, 0.0])
    assert router_summary(busy)["expert_load_min"] > 0.5 and router_summary(idle)["expert_load_min"] == 0.0
    bias = {"blocks": {"mlp": {"core": {"router_bias": jnp.zeros((1, 4))}}}}
    router = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in idle.items()}
    moved = balanced(config, bias, router)["blocks"]["mlp"]["core"]["router_bias"][0]
    assert moved[2] == pytest.approx(config.moe.balance_rate) and moved.min() < 0


def test_slow_step() -> None:
    """Time that a run waits for data, and what is compiled again, is told apart from the step."""
    phases, double = Phases(), jax.jit(lambda x: 2 * x)
    with phases.listening():
        for size in (1, 2):  # another shape is another program
            with phases("data"):
                time.sleep(0.05)
            with phases("step"):
                jax.block_until_ready(double(jnp.ones(size)))
    taken = phases.take()
    assert 0.1 <= taken["data_wait"] < 10 and taken["recompilations"] >= 1 and taken["compile_seconds"] > 0
    assert phases.take()["data_wait"] == 0.0


@pytest.mark.long
def test_out_of_memory() -> None:
    """A step needs less memory beside its state with rematerialisation, and with smaller micro-batches."""

    def scratch(remat: str = "none", accumulation: int = 1) -> int:
        made = trainer(small(model={"layers": 12, "remat": remat}, train={"accumulation": accumulation}))
        program: Any = made.step
        analysis = program.lower(made.abstract, packed(8)).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    whole = scratch()
    assert scratch(remat="full") < 0.7 * whole
    assert scratch(accumulation=4) < 0.7 * whole


def test_sure_and_wrong() -> None:
    """The entropy of a model that is surer where it is wrong scores below chance, and another signal above."""
    rng = np.random.default_rng(0)
    kl = rng.gamma(0.4, 0.3, (50, 8))
    entropy = 1.0 - np.tanh(kl) + 0.1 * rng.normal(size=kl.shape)
    scored = signals.score({"output": entropy, "joint": kl + 0.1 * rng.normal(size=kl.shape)}, kl)
    assert float(scored.auc["output"].high) < 0.5 < float(scored.auc["joint"].low)
    assert float(scored.gain["joint"].low) > 0
