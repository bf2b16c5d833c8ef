"""Test runs in this process: resumed bit for bit, left alone when finished, refused if changed, repaired if torn."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc import config as configs
from mhc.config import Config
from mhc.data import pipeline
from mhc.data.tokenizers import load
from mhc.errors import UserError
from mhc.eval.compare.probe_again import probe_run
from mhc.files import read_json, read_jsonl
from mhc.run_folder import lock
from mhc.sharding import make_mesh, put_batch
from mhc.train import opened, plan
from mhc.train import run as runs
from mhc.train.checkpoint import Checkpoints, committed_steps, load_run
from mhc.train.opened import Opened
from mhc.train.record import Record
from mhc.train.setup import Setup
from mhc.train.step import Trainer
from tests.small import assert_identical
from tests.small_runs import assert_equal_runs, config, final_state, lines, resolved, run, snapshot, write_corpus

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def reference(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed run of 12 steps; tests must not change it, but copy it."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run(config(corpus), folder) == 0
    return folder


@pytest.fixture
def finished(reference: Path, tmp_path: Path) -> Path:
    """Return a copy of the undisturbed run."""
    return Path(shutil.copytree(reference, tmp_path / "finished"))


class Crash(Exception):
    """Stands for a power cut."""


def crash_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let the run die where the metrics of `step` would be written."""
    write = Record.step

    def step_or_crash(self: Record, at: int, *args: Any, **kwargs: Any) -> Any:
        if at == step:
            raise Crash
        return write(self, at, *args, **kwargs)

    patch.setattr(Record, "step", step_or_crash)


def interrupted(made: Config, folder: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        crash_at(step, patch)
        with pytest.raises(Crash):
            run(made, folder)


# The record -----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_whole_record(reference):
    metrics, probed = read_jsonl(reference / "metrics.jsonl"), read_jsonl(reference / "probes.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, 13))
    assert [record["step"] for record in metrics if "val_loss" in record] == [6, 12]
    assert [record["step"] for record in probed] == [0, 3, 6, 9, 12]
    assert metrics[-1]["tokens"] == 12 * 8 * 16  # training has no padding
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert committed_steps(reference) == [8, 12]
    summary = read_json(reference / "summary.json")
    assert (summary["exit_reason"], summary["steps"], summary["kind"]) == ("finished", 12, "mhc")
    assert summary["val_loss"] == metrics[-1]["val_loss"] and summary["final_loss"] == metrics[-1]["loss"]


def test_every_measure_of_a_probe_has_one_value_a_sublayer(reference):
    for record in read_jsonl(reference / "probes.jsonl"):
        gains = [key for key in record if key.startswith(("gain/", "ds_error/"))]
        assert len(gains) >= 10
        for key in gains:
            assert np.shape(record[key]) == (4,), key
        # a doubly stochastic map has gain 1 one way exactly, the other way up to Sinkhorn's error
        np.testing.assert_allclose(record["gain/forward_composite_mean"], 1.0, atol=1e-4)


def test_gains_of_the_checkpoints_equal_the_logged_ones(reference):
    for step in committed_steps(reference):
        logged = [record for record in read_jsonl(reference / "probes.jsonl") if record["step"] == step]
        if not logged:
            continue
        measured = probe_run(load_run(reference, step))
        for key in measured:
            if key.startswith("gain/"):
                np.testing.assert_allclose(measured[key], logged[0][key], rtol=1e-6, err_msg=key)
    assert logged  # that of step 12


def test_the_restored_model_has_the_saved_loss(reference):
    """The validation loss of the last checkpoint is exactly the logged one; load_run gives its parameters."""
    made = read_json(reference / "config.json")
    step, state, _ = final_state(reference)
    logged = [record for record in read_jsonl(reference / "metrics.jsonl") if record["step"] == step]
    stored = resolved(config(made["data"]["source"]))
    trainer = Trainer(stored, make_mesh(stored.mesh, jax.devices()[:1]))
    parts = [
        jax.device_get(trainer.validate(state.params, put_batch(batch, trainer.mesh)))
        for batch in pipeline.validation_batches(stored.data, load("bytes"), batch_size=8, count=16, spread=True)
    ]
    assert len(parts) == 2
    total = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    assert total["nll"] / total["weight"] == logged[0]["val_loss"]
    assert total["nll"] / np.log(2) / total["bytes"] == pytest.approx(logged[0]["val_bits_per_byte"], rel=1e-12)
    assert_identical(load_run(reference).params, state.params)


# Interrupted runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.product), 12])
def test_a_crashed_run_continues_bit_for_bit(step, corpus, reference, tmp_path):
    """It crashes before the first checkpoint and at the last step; the next test crashes between them."""
    interrupted(config(corpus), tmp_path / "run", step)
    assert run(config(corpus), tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", reference)


def test_a_run_crashed_again_and_again_continues_bit_for_bit(corpus, reference, tmp_path):
    for step in (6, 7, 7, 10):
        interrupted(config(corpus), tmp_path / "run", step)
    assert run(config(corpus), tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_stops_after_the_step_in_hand_and_saves(number, corpus, reference, tmp_path, monkeypatch):
    folder, write = tmp_path / "run", Record.step

    def step_and_signal(self: Record, at: int, *args: Any, **kwargs: Any) -> Any:
        if at == 5:
            os.kill(os.getpid(), number)
        return write(self, at, *args, **kwargs)

    handlers = {signal_: signal.getsignal(signal_) for signal_ in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as patch:
        patch.setattr(Record, "step", step_and_signal)
        assert run(config(corpus), folder) == 0
    assert {signal_: signal.getsignal(signal_) for signal_ in handlers} == handlers
    stopped = committed_steps(folder)[-1]
    assert stopped in (5, 6) and read_json(folder / "summary.json")["exit_reason"] == "stopped"
    assert [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] == list(range(1, stopped + 1))
    assert [(e["event"], e["step"]) for e in read_jsonl(folder / "events.jsonl")] == [("stopped", stopped)]
    assert run(config(corpus), folder) == 0
    assert [e["event"] for e in read_jsonl(folder / "events.jsonl")] == ["stopped", "resume"]
    assert_equal_runs(folder, reference)


@pytest.mark.parametrize(
    "moment",
    [
        "validation",
        "asynchronous save",
        *(pytest.param(one, marks=pytest.mark.product) for one in ("probe", "last save")),
    ],
)
def test_a_signal_at_any_moment_loses_nothing(moment, corpus, reference, tmp_path, monkeypatch):
    """The signal comes while the run validates or probes, and while a checkpoint is being written behind it."""
    folder, saving = tmp_path / "run", []
    owner, name, at = {
        "validation": (Opened, "validate", 6),
        "probe": (Opened, "measure", 3),
        "asynchronous save": (Checkpoints, "save", 4),
        "last save": (Checkpoints, "save", 12),
    }[moment]
    original = getattr(owner, name)

    def signalled(self: Any, *args: Any) -> Any:
        given = original(self, *args)
        if (args[1] if owner is Checkpoints else self.standing).step == at:
            saving.append(owner is Checkpoints and self._manager.is_saving_in_progress())
            os.kill(os.getpid(), signal.SIGTERM)
        return given

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        assert run(config(corpus), folder) == 0
    assert saving == [owner is Checkpoints]
    stopped = committed_steps(folder)[-1]
    assert at <= stopped <= at + 1
    assert [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] == list(range(1, stopped + 1))
    assert read_json(folder / "summary.json")["exit_reason"] == ("finished" if stopped == 12 else "stopped")
    assert run(config(corpus), folder) == 0
    assert_equal_runs(folder, reference)


def test_a_signal_before_the_first_step_is_heard(corpus, reference, tmp_path, monkeypatch):
    folder, restore = tmp_path / "run", opened.restored

    def restore_and_signal(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return restore(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(opened, "restored", restore_and_signal)
        assert run(config(corpus), folder) == 0
    assert read_json(folder / "summary.json")["exit_reason"] == "stopped"
    assert run(config(corpus), folder) == 0
    assert_equal_runs(folder, reference)


def test_batches_go_on_where_they_stopped(corpus, tmp_path, monkeypatch):
    """Every batch that reaches the step, over a crash and a resume, is the one of an undisturbed iterator."""
    made = config(corpus)
    seen: list[np.ndarray] = []
    put = runs.put_batch

    def recorded(batch: Any, mesh: Any) -> Any:
        if batch["tokens"].shape == (8, 16) and "target_bytes" in batch:
            seen.append(batch["tokens"].copy())
        return put(batch, mesh)

    monkeypatch.setattr(Opened, "validate", lambda self: {"val_loss": 0.0, "val_bits_per_byte": 0.0})
    monkeypatch.setattr(runs, "put_batch", recorded)
    interrupted(made, tmp_path / "run", 7)
    taken = len(seen)
    assert taken >= 7
    assert run(made, tmp_path / "run") == 0
    resumed_at = 4
    order = seen[:resumed_at] + seen[taken:]
    stream = pipeline.train_iterator(made.data, load("bytes"), batch_size=8, seed=0)
    expected = [batch["tokens"] for batch in itertools.islice(stream, 12)]
    stream.close()
    np.testing.assert_array_equal(order, expected)


def test_a_torn_line_is_repaired(corpus, reference, tmp_path):
    folder = tmp_path / "run"
    interrupted(config(corpus), folder, 7)
    for name in ("metrics", "probes", "events"):
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"step":7,"loss":3.0')
    assert run(config(corpus), folder) == 0
    assert_equal_runs(folder, reference)


def test_an_uncommitted_checkpoint_is_not_seen(corpus, reference, tmp_path):
    folder = tmp_path / "run"
    interrupted(config(corpus), folder, 7)
    assert committed_steps(folder) == [4]
    # What orbax leaves behind when it dies while saving: the folder under its temporary name, incomplete.
    torn = folder / "checkpoints" / "6.orbax-checkpoint-tmp"
    shutil.copytree(folder / "checkpoints" / "4", torn)
    shutil.rmtree(torn / "state")
    assert committed_steps(folder) == [4] and load_run(folder).step == 4
    assert run(config(corpus), folder) == 0
    assert read_jsonl(folder / "events.jsonl")[0]["step"] == 4
    assert not torn.exists()
    assert_equal_runs(folder, reference)


# Finished, longer and changed runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [12, 8])
def test_a_finished_run_is_left_alone(steps, corpus, finished, capsys):
    """It is so with TensorBoard on, whose writer makes a file when it opens, and where fewer steps are asked for."""
    before = snapshot(finished)
    assert run(config(corpus, train={"steps": steps}, monitor={"tensorboard": True}), finished) == 0
    assert snapshot(finished) == before
    assert "finished already" in capsys.readouterr().err


@pytest.mark.long
def test_more_steps_go_on_from_the_end(corpus, reference, tmp_path):
    """At a constant rate a run of 8 steps, lengthened to 12, ends where a run of 12 does."""
    folder = tmp_path / "run"
    assert run(config(corpus, train={"steps": 8}), folder) == 0
    with pytest.MonkeyPatch.context() as patch:  # it dies between the last checkpoint and the summary
        patch.setattr(runs.Run, "_finish", lambda self, run, log: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(config(corpus), folder)
    assert committed_steps(folder)[-1] == 12 and read_json(folder / "summary.json")["steps"] == 8
    assert run(config(corpus), folder) == 0
    assert read_json(folder / "summary.json")["steps"] == 12
    (resume,) = read_jsonl(folder / "events.jsonl")
    assert (resume["event"], resume["step"]) == ("resume", 8)
    assert resume["changes"]["train.steps"] == [8, 12]
    metrics, expected = lines(folder, "metrics"), lines(reference, "metrics")
    for record in metrics:
        if record["step"] == 8:  # the last step of the short run was validated
            assert record.pop("val_loss") and record.pop("val_bits_per_byte")
    assert metrics == expected
    assert_identical(final_state(folder)[1], final_state(reference)[1])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"optimizer": {"lr": 2e-2}}, ["optimizer.lr", "0.01", "0.02"]),
        ({"residual": {"kind": "hc"}, "seed": {"data": 1}}, ["residual.kind", "'mhc'", "'hc'", "seed.data"]),
        ({"model": {"layers": 3, "width": 8}}, ["model.layers", "2", "3"]),
    ],
    ids=["rate", "kind and seed", "depth"],
)
def test_a_changed_config_is_refused_by_name_and_nothing_is_touched(change, names, corpus, finished):
    before = snapshot(finished)
    with pytest.raises(UserError) as refused:
        run(config(corpus, **change), finished)
    assert all(name in str(refused.value) for name in names)
    assert snapshot(finished) == before


def test_a_corpus_that_changed_is_told_by_file(tmp_path: Path) -> None:
    source, texts = write_corpus(tmp_path / "texts"), tmp_path / "texts"
    assert run(config(source, "plain", train={"steps": 4}), tmp_path / "run") == 0
    kept = (tmp_path / "run" / "corpus.json").read_bytes()
    more = config(source, "plain", train={"steps": 6})
    before = (texts / "03.txt").read_text()

    def refused() -> str:
        with pytest.raises(UserError, match=r"another corpus in data\.source") as raised:
            run(more, tmp_path / "run")
        assert (tmp_path / "run" / "corpus.json").read_bytes() == kept
        return str(raised.value).rpartition("; since the run was here last: ")[2]

    (texts / "03.txt").write_text(before + "x")
    size = len(before.encode())
    assert refused() == f"03.txt has {size + 1:,} bytes, it had {size:,}"
    (texts / "04.txt").rename(texts / "041.txt")
    assert refused() == f"03.txt has {size + 1:,} bytes, it had {size:,}, 04.txt is gone, 041.txt is new"
    for number in range(10, 20):
        (texts / f"{number}.txt").unlink()
    assert refused().endswith(" and 8 more")
    shutil.rmtree(texts)
    write_corpus(texts)
    assert run(more, tmp_path / "run") == 0
    (tmp_path / "run" / "corpus.json").write_text("{")  # no help, and no harm
    (texts / "03.txt").unlink()
    with pytest.raises(
        UserError, match=r"another corpus in data\.source \([^)]*\); restore what it was, or begin [^;]*$"
    ):
        run(config(source, "plain", train={"steps": 8}), tmp_path / "run")


@pytest.mark.parametrize(
    ("steps", "derived"), [(1, 16), (12, 16), (64, 16), (100, 25), (255, 63), (256, 64), (5000, 64)]
)
def test_a_short_run_judges_after_less_history(steps: int, derived: int, corpus: str) -> None:
    assert resolved(config(corpus, train={"steps": steps})).monitor.zscore_min_history == derived
    narrow = resolved(config(corpus, train={"steps": steps}, monitor={"zscore_window": 8}))
    assert narrow.monitor.zscore_min_history == 8
    told = config(corpus, train={"steps": steps}, monitor={"zscore_min_history": 5})
    assert resolved(told).monitor.zscore_min_history == 5


@pytest.mark.parametrize("stored", [16, 64])  # the latter: as runs had it whatever their length
def test_a_run_keeps_the_history_that_it_began_with(stored: int, corpus: str, finished: Path) -> None:
    written = read_json(finished / "config.json")
    written["monitor"]["zscore_min_history"] = stored
    (finished / "config.json").write_text(json.dumps(written))
    made = Setup(config(corpus, train={"steps": 400}), finished, devices=jax.devices()[:1])
    made.data.close()
    assert made.config.monitor.zscore_min_history == stored
    assert "monitor.zscore_min_history" not in made.changes and "train.steps" in made.changes
    before = configs.from_json((finished / "config.json").read_text())
    assert configs.check_resume(before, resolved(config(corpus))) == {}
    with pytest.raises(UserError, match=rf"monitor.zscore_min_history: stored {stored}, given 30"):
        runs.Run(config(corpus, monitor={"zscore_min_history": 30}), finished, devices=jax.devices()[:1])


def test_what_was_not_judged_is_not_said_to_be_calm(
    finished: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = read_json(finished / "summary.json")
    assert (summary["judged_steps"], summary["spikes"]) == (0, None)
    assert summary["spike_score_loss"] is None and summary["spike_score_grad_norm"] is None
    made = config(corpus, monitor={"zscore_min_history": 4})
    assert run(made, tmp_path / "run") == 0
    said = "compiling, then training from step 1; loss and gradient norm are judged from step 5 on "
    assert f"{tmp_path}/run: {said}(monitor.zscore_min_history=4)" in capsys.readouterr().err
    assert run(config(corpus, "plain", train={"steps": 2}), tmp_path / "short") == 0
    assert "; 2 steps are too few to judge loss and gradient norm by" in capsys.readouterr().err
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["judged_steps"] == 8 and isinstance(summary["spikes"], int)


def test_a_user_s_mistake_writes_nothing(corpus, tmp_path):
    folder = tmp_path / "run"
    for change in (
        {"data": {"source": f"text:{tmp_path}/nothing*.txt"}},
        {"mesh": {"data": 3}},
        {"train": {"batch_size": 9, "accumulation": 2}},
    ):
        with pytest.raises(UserError):
            run(config(corpus, **change), folder)
    assert not folder.exists()


def test_a_folder_has_one_process_at_a_time(corpus, finished):
    with lock(finished), pytest.raises(UserError, match="another process"):
        run(config(corpus), finished)


# Dry run --------------------------------------------------------------------------------------------------------------


def test_dry_run_counts_without_allocating(corpus, monkeypatch):
    monkeypatch.setattr(Trainer, "init", lambda *_: pytest.fail("allocated"))
    described = plan.dry_run(config(corpus, mesh={"fsdp": 2}))
    json.dumps(described)
    groups = described["params"]["by_group"]
    assert sum(groups.values()) == described["params"]["total"]
    assert groups["maps"] == described["params"]["maps"] == 2 * 2 * (4 * 8 * 24 + 24 + 3)
    assert described["tokens_per_step"] == 8 * 16
    assert described["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1, "expert": 1}
    assert described["residual"]["n"] == 4


@pytest.mark.parametrize("spec", ["text:{}/*.jsonl", "mix:a=1*text:{}/**/*;b=1*text:{}/x.txt", "text:{}/run/run.json"])
@pytest.mark.parametrize("field", ["source", "validation"])
def test_a_corpus_that_would_take_in_the_run_is_refused(field: str, spec: str, corpus: str, tmp_path: Path) -> None:
    folder = tmp_path if spec.endswith("*.jsonl") else tmp_path / "run"
    spec = spec.replace("{}", str(tmp_path))
    if field == "validation":
        spec = spec.replace("mix:a=1*", "sets:a=").replace("b=1*", "b=")
    made = config(corpus, "plain", data={field: spec})
    with pytest.raises(UserError, match=rf"--workdir .*: data\.{field}=.* matches what is written there"):
        runs.Run(made, folder, devices=jax.devices()[:1])
    assert not list(tmp_path.iterdir())
