"""Test faults in real runs: each gets its right cause, and each action does what it says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config, from_config_dict
from mhc.files import read_jsonl
from mhc.train.checkpoint import load_run
from mhc.train.opened import Opened, Pending
from mhc.train.record import batch_hash
from mhc.train.run import Run
from mhc.train.step import Faults
from tests.small import assert_identical

AT = 12  # completed steps when the fault strikes: it is step 13


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(40)]
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words, 3000)))
    return f"text:{folder}/*.txt"


def config(corpus: str, kind: str = "mhc", **groups: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "width": 16},
        "attention": {"heads": 2, "impl": "xla"},
        "mlp": {"width": 24},
        "residual": {"kind": kind},
        "data": {"source": corpus, "sequence_length": 16},
        "schedule": {"kind": "constant"},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 20, "batch_size": 8},
        "validation": {"every": 0, "batches": 1},
        "checkpoint": {"every": 5, "keep": 10},
        "monitor": {
            "probe_every": 1,
            "probe_sequences": 8,
            "tensorboard": False,
            "progress_every": 0,
            "zscore_window": 12,
            "zscore_min_history": 8,
        },
    }
    for group, fields in groups.items():
        base[group] = {**base.get(group, {}), **fields}
    return from_config_dict(base)


def with_steps(cfg: Config, steps: int) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=steps))


def at_fault(step: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(step == AT, new, old)


def replaced(tree: Any, path: str, change: Any) -> Any:
    """Return the tree with the leaf at ``path`` (a/b/c) changed."""
    head, _, rest = path.partition("/")
    return {**tree, head: replaced(tree[head], rest, change) if rest else change(tree[head])}


def nan_gradient(step: jax.Array, grads: Any) -> Any:
    return replaced(grads, "blocks/mlp/core/down", lambda leaf: at_fault(step, leaf.at[1, 0, 0].set(jnp.nan), leaf))


def nan_weight(step: jax.Array, params: Any) -> Any:
    return replaced(params, "blocks/attention/core/out", lambda leaf: at_fault(step, leaf.at[1].set(jnp.inf), leaf))


def infinite_loss(step: jax.Array, loss: jax.Array) -> jax.Array:
    return at_fault(step, jnp.asarray(jnp.inf), loss)


def tenfold_loss(step: jax.Array, loss: jax.Array) -> jax.Array:
    return at_fault(step, 10 * loss, loss)


def tenfold_gradients(step: jax.Array, grads: Any) -> Any:
    return jax.tree.map(lambda leaf: at_fault(step, 100 * leaf, leaf), grads)


def prepared(cfg: Config, folder: Path, faults: Faults | None = None) -> Run:
    return Run(cfg, folder, faults, devices=jax.devices()[:1])


def run(folder: Path, cfg: Config, faults: Faults | None) -> tuple[int, Opened, list[dict[str, Any]]]:
    made = prepared(cfg, folder, faults)
    code = made.execute()
    assert made.opened is not None
    return code, made.opened, read_jsonl(folder / "events.jsonl")


def alarms(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] in ("spike", "nonfinite") and event["step"] == AT + 1]


@pytest.mark.parametrize(
    ("faults", "tensor"),
    [
        pytest.param(
            Faults(gradients=nan_gradient),
            "gradient of sublayer 3 (feed-forward of block 1)",
            id="gradient",
            marks=pytest.mark.product,
        ),
        pytest.param(
            Faults(params=nan_weight),
            "output of sublayer 2 (attention of block 1), forward",
            id="forward",
            marks=pytest.mark.product,
        ),
        pytest.param(Faults(loss=infinite_loss), "loss, forward", id="loss", marks=pytest.mark.product),
    ],
)
def test_halt_names_the_tensor_and_leaves_a_checkpoint_that_resumes(tmp_path, corpus, faults, tensor):
    cfg = config(corpus)
    code, made, events = run(tmp_path, cfg, faults)
    assert code == 3
    assert made.halted is not None
    assert tensor in made.halted
    (alarm,) = alarms(events)
    assert (alarm["cause"], alarm["action"], alarm["tensor"]) == ("nonfinite", "halt", tensor)
    assert len(alarm["batch"]["documents"]) == 8
    assert alarm["history"]["step"] == list(range(1, AT + 2))
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "halted"
    stopped = load_run(tmp_path)
    assert stopped.step == AT + 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stopped.params))
    code, _, _ = run(tmp_path, cfg, None)
    assert code == 0
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 21))


@pytest.mark.long
def test_a_nonfinite_step_leaves_no_trace_but_in_the_counters(tmp_path, corpus):
    """Later steps are those of a run whose batch 13 was left out; schedule, optimiser and parameters alike."""
    cfg = config(corpus, guard={"on_nonfinite": "skip"}, train={"steps": AT + 1})
    code, made, events = run(tmp_path / "a", cfg, Faults(gradients=nan_gradient))
    assert code == 0
    assert [event["cause"] for event in alarms(events)] == ["nonfinite"]
    _, before, _ = run(tmp_path / "b", with_steps(cfg, AT), None)
    assert_identical(made.state.params, before.state.params)
    assert_identical(made.state.opt_state, before.state.opt_state)
    assert (int(made.state.skipped), int(made.state.nonfinite), int(made.state.step)) == (1, 1, AT + 1)


@pytest.mark.long
def test_skip_leaves_out_a_spike(tmp_path, corpus):
    falling = {"kind": "cosine", "warmup_steps": 4, "decay_steps": 20}
    cfg = config(corpus, guard={"on_spike": "skip"}, schedule=falling, train={"steps": AT + 2})
    _, made, events = run(tmp_path / "a", with_steps(cfg, AT + 1), Faults(loss=tenfold_loss))
    (alarm,) = alarms(events)
    assert (alarm["cause"], alarm["action"], alarm["flagged"]) == ("loss_spike", "skip", ["loss"])
    _, before, _ = run(tmp_path / "b", with_steps(cfg, AT), None)
    assert_identical(made.state.params, before.state.params)
    assert_identical(made.state.opt_state, before.state.opt_state)
    assert int(made.state.skipped) == 1
    losses = made.state.guard.losses
    assert losses is not None
    assert float(jnp.nanmax(losses.values)) > 20  # skipped values enter the history
    # The schedule stays too: the step after it has the rate that the skipped one had, to the bit.
    run(tmp_path / "a", cfg, None)
    rates = [record["lr"] for record in read_jsonl(tmp_path / "a" / "metrics.jsonl")]
    assert rates[AT - 1] > rates[AT] == rates[AT + 1]


@pytest.mark.long
def test_clip_scales_the_update(tmp_path, corpus):
    cfg = config(corpus, guard={"on_spike": "clip", "zclip_warmup": 8}, optimizer={"clip_norm": None})
    _, _, events = run(tmp_path, cfg, Faults(gradients=tenfold_gradients))
    (alarm,) = alarms(events)
    assert alarm["cause"] == "gradient_explosion"
    records = {record["step"]: record for record in read_jsonl(tmp_path / "metrics.jsonl")}
    assert records[AT + 1]["clip_scale"] < 0.1
    assert records[AT]["clip_scale"] > 0.5


@pytest.mark.long
def test_rewind_lands_where_it_says_and_stops_after_max_rewinds(tmp_path, corpus):
    guard = {"on_spike": "rewind", "rewind_steps": 4, "skip_batches": 3, "max_rewinds": 2}
    cfg = config(corpus, guard=guard)
    code, made, events = run(tmp_path, cfg, Faults(loss=tenfold_loss))
    assert code == 3
    assert "after 2 rewinds" in str(made.halted)
    rewinds = [event for event in events if event["event"] == "rewind"]
    assert [(event["to"], event["skipped_batches"]) for event in rewinds] == [(5, 3), (5, 6)]
    assert made.standing.seconds == 0.0  # of earlier processes: the checkpoint's were spent in this one
    steps = [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1))


class Recording:
    """Wraps a data iterator: it remembers what it gave, and may change a batch by its number, from 1."""

    def __init__(self, data: Any, change: Callable[[int, dict[str, np.ndarray]], None] = lambda number, batch: None):
        self.data, self.change = data, change
        self.batches: list[dict[str, np.ndarray]] = []

    def __next__(self) -> Any:
        batch = dict(next(self.data))
        self.change(len(self.batches) + 1, batch)
        self.batches.append(batch)
        return batch

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.data, attribute)


@pytest.mark.long
def test_rewind_leaves_out_the_stated_batches(tmp_path, corpus):
    """After a rewind to step 5 over 3 batches, step 6 takes what step 9 took before."""
    seen: dict[str, list[np.ndarray]] = {}
    for name, faults in (("plain", None), ("rewound", Faults(loss=tenfold_loss))):
        guard = {"on_spike": "rewind", "rewind_steps": 4, "skip_batches": 3, "max_rewinds": 1}
        made = prepared(config(corpus, guard=guard), tmp_path / name, faults)
        made.setup.data = Recording(made.setup.data)  # type: ignore[assignment]
        made.execute()
        seen[name] = [batch["tokens"] for batch in made.setup.data.batches]  # type: ignore[attr-defined]
    # A probe after every step leaves none in flight: 13 steps, then three batches left out, then step 6 anew.
    rewound, plain = seen["rewound"], seen["plain"]
    np.testing.assert_array_equal(rewound[AT + 1], plain[5])
    np.testing.assert_array_equal(rewound[AT + 4], plain[8])


@pytest.mark.long
def test_a_bad_batch_is_found_and_named(tmp_path, corpus):
    """All targets are one id that no text of the corpus has: the loss jumps, and by rule the gradient with it."""

    def spoil(number: int, batch: dict[str, np.ndarray]) -> None:
        if number == AT + 1:
            batch["targets"] = np.where(batch["weights"] > 0, 255, batch["targets"]).astype(np.int32)

    # Twelve steps from the start the history is wide: a fivefold loss lies 5.8 of its standard deviations above it.
    cfg = config(corpus, train={"steps": AT + 1}, optimizer={"lr": 3e-2}, monitor={"zscore_threshold": 5.0})
    made = prepared(cfg, tmp_path)
    made.setup.data = Recording(made.setup.data, spoil)  # type: ignore[assignment]
    made.execute()
    (alarm,) = alarms(read_jsonl(tmp_path / "events.jsonl"))
    assert (alarm["cause"], alarm["flagged"]) == ("gradient_explosion", ["loss", "grad_norm"])
    assert alarm["loss"] > 4 * alarm["history"]["loss"][-2]
    assert alarm["batch"]["hash"] == batch_hash(made.setup.data.batches[AT])  # type: ignore[attr-defined]


def exploding(step: jax.Array, params: Any) -> Any:
    """Return parameters of static HC whose block 0 amplifies its streams at the feed-forward more and more."""
    grow = jnp.where(step >= AT - 4, 50.0 * (step - AT + 5), 1.0)
    return replaced(params, "blocks/mlp_residual/b_res", lambda leaf: leaf.at[0].multiply(grow))


def collapsing(step: jax.Array, params: Any) -> Any:
    """Return parameters that give every token one embedding, which the head likes least for the corpus' letters."""
    late = step >= AT - 2
    least = -jnp.sum(params["head"]["kernel"][:, jnp.array(list(b"abcdefgh "))], axis=1)

    def change(table: jax.Array) -> jax.Array:
        return jnp.where(late, 100.0 * jnp.broadcast_to(least, table.shape), table)

    return replaced(params, "embed/table", change)


@pytest.mark.long
def test_a_stream_that_explodes_is_a_signal_explosion(tmp_path, corpus, monkeypatch):
    """The probe sees the parameters as they are, so the fault is put into them between steps, not inside one."""
    cfg = config(corpus, "hc", guard={"forward_gain": 20.0, "on_nonfinite": "skip"})
    made = prepared(cfg, tmp_path)
    original = Opened.log

    def log(run: Opened, pending: Pending, **due: bool) -> Any:
        run.state = run.state._replace(params=jax.jit(exploding)(jax.device_put(pending.step), run.state.params))
        return original(run, pending, **due)

    monkeypatch.setattr(Opened, "log", log)
    made.execute()
    events = read_jsonl(tmp_path / "events.jsonl")
    crossed = [event for event in events if event["event"] == "monitor" and event["monitor"] == "forward_gain"]
    assert crossed
    spikes = [event for event in events if event["event"] == "spike" and event["step"] > crossed[0]["step"]]
    assert spikes
    assert {event["cause"] for event in spikes} == {"signal_explosion"}
    assert all("forward_gain" in event["monitors"] for event in spikes)


@pytest.mark.long
def test_a_representation_in_one_direction_is_a_collapse(tmp_path, corpus, monkeypatch):
    cfg = config(corpus, "plain", guard={"residual_rms": 1e6, "attention_logit": 1e6})
    cfg = dataclasses.replace(cfg, monitor=dataclasses.replace(cfg.monitor, zscore_threshold=4.0))
    made = prepared(cfg, tmp_path)
    original = Opened.log

    def log(run: Opened, pending: Pending, **due: bool) -> Any:
        run.state = run.state._replace(params=jax.jit(collapsing)(jax.device_put(pending.step), run.state.params))
        return original(run, pending, **due)

    monkeypatch.setattr(Opened, "log", log)
    made.execute()
    events = read_jsonl(tmp_path / "events.jsonl")
    assert any(event["event"] == "monitor" and event["monitor"] == "representation_rank" for event in events)
    spikes = [event for event in events if event["event"] == "spike"]
    assert spikes
    assert spikes[0]["cause"] == "representation_collapse"


@pytest.mark.long
@pytest.mark.parametrize("action", ["log", "skip"])
def test_events_of_a_resumed_run_equal_those_of_an_undisturbed_one(action, tmp_path, corpus, monkeypatch):
    """The windows of ``log`` are read from the record again; those of ``skip`` come with the checkpoint."""
    cfg = config(corpus, guard={"on_spike": action})
    faults = Faults(gradients=tenfold_gradients)
    _, _, undisturbed = run(tmp_path / "a", cfg, faults)
    made = prepared(cfg, tmp_path / "b", faults)
    original = Opened.log

    def crash(run: Opened, pending: Pending, **due: bool) -> Any:
        if pending.step == AT - 1:
            raise RuntimeError("crash")
        return original(run, pending, **due)

    with monkeypatch.context() as patch:
        patch.setattr(Opened, "log", crash)
        with pytest.raises(RuntimeError, match="crash"):
            made.execute()
    _, _, resumed = run(tmp_path / "b", cfg, faults)

    def comparable(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in event.items() if k != "time"} for event in events if event["event"] != "resume"]

    assert alarms(undisturbed)
    assert comparable(resumed) == comparable(undisturbed)
