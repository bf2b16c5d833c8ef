"""Test the watcher: each checkpoint is scored once as it comes, over restarts and deletions, until the run is done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mhc.errors import UserError
from mhc.eval import watch
from mhc.files import read_json, read_jsonl
from mhc.train.checkpoint import committed_steps
from tests.small_runs import config, run, snapshot, write_corpus

HOW = {"rows": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 12 steps with the checkpoints 4, 8 and 12, which tests must not change."""
    root = tmp_path_factory.mktemp("watch")
    scored = {"validation": {"every": 4}, "checkpoint": {"keep": 3}, "monitor": {"probe_every": 0}}
    made = config(write_corpus(root / "texts"), "plain", **scored)
    assert run(made, root / "run") == 0
    assert committed_steps(root / "run") == [4, 8, 12]
    return root / "run"


class Training:
    """Commits a checkpoint of a run whenever the watcher sleeps."""

    def __init__(self, trained: Path, folder: Path):
        self.trained, self.folder = trained, folder
        self.left = [4, 8, 12]
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(trained / "config.json", folder)
        self.commit()

    def commit(self) -> None:
        step = self.left.pop(0)
        shutil.copytree(self.trained / "checkpoints" / str(step), self.folder / "checkpoints" / str(step))
        if not self.left:
            shutil.copy(self.trained / "summary.json", self.folder)

    def delete(self, step: int) -> None:
        shutil.rmtree(self.folder / "checkpoints" / str(step))

    def sleep(self, seconds: float) -> None:
        self.commit()


def follow(training: Training, out: Path, measure: Any = lambda step: {"loss": 1.0 / step}, **options: Any) -> int:
    how = options.pop("how", HOW)
    given: dict[str, Any] = {"every_seconds": 9.0, "once": False, "sleep": training.sleep} | options
    return watch.watch(training.folder, out, how, measure, **given)


def steps(out: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(out)]


# When a checkpoint is scored ------------------------------------------------------------------------------------------


def test_each_checkpoint_is_scored_as_it_comes_and_the_end_ends_it(trained, tmp_path):
    training, out = Training(trained, tmp_path / "run"), tmp_path / "scores.jsonl"
    assert follow(training, out) == 3
    assert [(line["step"], line["loss"]) for line in read_jsonl(out)] == [(4, 1 / 4), (8, 1 / 8), (12, 1 / 12)]
    assert all(line["how"] == HOW and line["run"] == str(tmp_path / "run") for line in read_jsonl(out))


def test_it_goes_on_where_it_stopped(trained, tmp_path):
    training, out = Training(trained, tmp_path / "run"), tmp_path / "scores.jsonl"
    assert follow(training, out, once=True) == 1 and steps(out) == [4]
    with out.open("a") as file:
        file.write('{"run":"tor')  # a crash
    assert follow(training, out) == 2 and steps(out) == [4, 8, 12]
    assert follow(training, out) == 0 and steps(out) == [4, 8, 12]
    assert follow(training, out, how={"rows": 8}) == 3  # other scores


def test_a_run_that_was_lengthened_or_stopped_is_not_done(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    assert watch.finished(folder)
    stored, summary = read_json(folder / "config.json"), read_json(folder / "summary.json")
    (folder / "config.json").write_text(json.dumps({**stored, "train": {**stored["train"], "steps": 13}}))
    assert not watch.finished(folder)
    (folder / "summary.json").write_text(json.dumps({**summary, "steps": 5, "exit_reason": "stopped"}))
    assert not watch.finished(folder)
    (folder / "summary.json").write_text(json.dumps({**summary, "steps": 5, "exit_reason": "halted"}))
    assert watch.finished(folder)
    (folder / "summary.json").unlink()
    assert not watch.finished(folder)


@pytest.mark.parametrize(
    ("summary", "config"),
    [
        ("{", "{}"),
        ("[]", "{}"),
        ("{}", "{}"),
        ('{"exit_reason": "", "steps": null}', '{"train": {"steps": 8}}'),
        ("{}", "[]"),
    ],
)
def test_a_damaged_summary_is_named(summary: str, config: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(summary)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"summary\.json and config\.json: not as a run writes them"):
        watch.finished(tmp_path)


def test_a_checkpoint_deleted_while_it_is_read_is_left_out(trained, tmp_path, capsys):
    training, out = Training(trained, tmp_path / "run"), tmp_path / "scores.jsonl"

    def measure(step: int) -> dict[str, float]:
        if step == 4:
            training.delete(4)
            raise FileNotFoundError("checkpoints/4/state/manifest.ocdbt")
        return {"loss": 0.0}

    assert follow(training, out, measure) == 2
    assert steps(out) == [8, 12]
    assert "checkpoint 4 was deleted while it was read" in capsys.readouterr().err


def test_a_real_checkpoint_that_goes_is_left_out_too(trained, tmp_path, capsys):
    """Its files go one by one while the loader reads it."""
    folder, out = Path(shutil.copytree(trained, tmp_path / "run")), tmp_path / "scores.jsonl"

    def measure(step: int) -> dict[str, Any]:
        if step == 8:
            shutil.rmtree(folder / "checkpoints" / "8" / "state")
        loaded = watch.checkpoints.load(str(folder), step)
        return {"steps": list(loaded.steps)}

    def deleting(seconds: float) -> None:  # the deletion ends while the watcher waits for it
        shutil.rmtree(folder / "checkpoints" / "8", ignore_errors=True)

    assert watch.watch(folder, out, HOW, measure, every_seconds=1.0, once=True, sleep=deleting) == 2
    assert steps(out) == [4, 12] and "checkpoint 8 was deleted" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_an_error(trained, tmp_path):
    training = Training(trained, tmp_path / "run")
    naps: list[float] = []

    def measure(step: int) -> dict[str, float]:
        raise UserError("checkpoint 4 is damaged")

    with pytest.raises(UserError, match="damaged"):
        follow(training, tmp_path / "scores.jsonl", measure, sleep=naps.append)
    assert 5 <= sum(naps) <= 30  # seconds that it was given to go


# The command line -----------------------------------------------------------------------------------------------------


def test_its_scores_are_those_of_the_run_s_own_validation(trained, tmp_path, capsys):
    before = snapshot(trained)
    out = tmp_path / "scores.jsonl"
    assert watch.main([str(trained), "--out", str(out), "--once"]) == 0
    logged = {
        record["step"]: record["val_loss"] for record in read_jsonl(trained / "metrics.jsonl") if "val_loss" in record
    }
    found = {line["step"]: line["loss"] for line in read_jsonl(out)}
    assert found == pytest.approx(logged, rel=1e-5) and set(found) == {4, 8, 12}
    assert snapshot(trained) == before
    assert "3 checkpoints scored" in capsys.readouterr().err
    assert watch.main([str(trained), "--out", str(out)]) == 0  # done: ends by itself
    assert len(read_jsonl(out)) == 3


def test_tasks_are_part_of_a_line(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "tasks_of", lambda names, data: (names, data))
    monkeypatch.setattr(watch, "perplexity", lambda *arguments: {"loss": 1.0, "bits_per_byte": 1.5})
    monkeypatch.setattr(watch, "benchmarks", lambda checkpoint, *how: {str(how): {"acc,none": 0.5}})
    out = tmp_path / "scores.jsonl"
    assert watch.main([str(trained), "--out", str(out), "--once", "--tasks", "piqa, arc", "--limit", "7"]) == 0
    for line in read_jsonl(out):
        assert line["tasks"] == {"((['piqa', 'arc'], None), 7)": {"acc,none": 0.5}}
        assert (line["how"]["tasks"], line["how"]["limit"]) == (["piqa", "arc"], 7)
    assert "loss 1.0000, 1.5000 bits per byte, (([" in capsys.readouterr().out


def test_the_default_file_lies_beside_the_run(trained):
    assert watch._checked(_options(), trained) == trained.parent / "run.scores.jsonl"
    assert not (trained.parent / "run.scores.jsonl").exists()


def _options(**changes: Any) -> Any:
    from argparse import Namespace

    fields = dict.fromkeys(("rows", "stride", "limit", "data", "tasks", "out"))
    return Namespace(**{**fields, "batch_size": 8, "every_seconds": 30.0, **changes})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "not a run folder"),
        (["RUN", "--every_seconds", "0"], "--every_seconds: given 0"),
        (["RUN", "--rows", "-1"], "--rows: given -1"),
        (["RUN", "--stride", "17"], "--stride: given 17, allowed: 1 to data.sequence_length=16"),
        (["RUN", "--limit", "3"], "none without --tasks"),
        (["RUN", "--out", "RUN/checkpoints/scores.jsonl"], "outside the run's folder"),
        (["RUN", "--out", "RUN/metrics.jsonl"], "outside the run's folder"),
        (["RUN", "--onc"], "did you mean --once"),
        (["RUN", "--config.model.width=8"], "the weights fix it"),
        (["gs://bucket/run"], "--out is needed"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, said, trained):
    before = snapshot(trained.parent)
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        watch.main([argument.replace("RUN", str(trained)) for argument in arguments])
    assert snapshot(trained.parent) == before
