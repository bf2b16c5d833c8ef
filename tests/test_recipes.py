"""Test docs/recipes.md to the word: every command's config is valid; every command runs, on small data."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mhc import cli
from mhc.files import read_jsonl
from mhc.grid import plan

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text("utf-8")


def commands() -> list[list[str]]:
    """Return the indented commands of the page, in order, as a shell splits them."""
    lines = re.findall(r"^    (python (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " ")) for line in lines]


TRAIN = [command for command in commands() if command[1] == "train.py"]

# What makes a command of the page small: a model and a run of seconds. Lengths stay as they are, four to one.
SMALL = {
    "model.layers": "2",
    "model.width": "16",
    "model.vocab_size": "None",
    "model.dtype": "float32",
    "attention.heads": "2",
    "data.sequence_length": "32",
    "train.batch_size": "4",
    "train.steps": "8",
    "schedule.warmup_steps": "2",
    "checkpoint.every": "4",
    "checkpoint.keep_every": "4",
    "validation.every": "0",
    "validation.batches": "1",
    "monitor.probe_every": "0",
}
# What a command says itself, made small.
SAID = {
    "--config.data.sequence_length=4096": "--config.data.sequence_length=128",
    "--config.positions.original_length=1024": "--config.positions.original_length=32",
    "--config.train.batch_size=128": "--config.train.batch_size=2",
    "--config.train.steps=1000": "--config.train.steps=4",
    "--config.train.steps=250": "--config.train.steps=2",
    "--config.schedule.wsd_steps=250": "--config.schedule.wsd_steps=2",
    "--config.schedule.warmup_steps=50": "--config.schedule.warmup_steps=1",
    "--config.train.init_from=runs/125m@1000": "--config.train.init_from=runs/125m@4",
    "50304": "400",
    "1024": "32",
}


def small(command: list[str]) -> list[str]:
    """Return the command for small data."""
    said = [SAID.get(argument, argument) for argument in command]
    if command[1] != "train.py" or "configs/of_run.py:runs/125m" in command:
        return said
    own = {argument.partition("=")[0] for argument in command}
    keep = {"train.steps", "checkpoint.every", "checkpoint.keep_every"} if "runs/few" in command else set()
    return said + [
        f"--config.{name}={value}"
        for name, value in SMALL.items()
        if name not in keep and (f"--config.{name}" not in own)
    ]


def test_the_page_has_every_recipe() -> None:
    programs = {" ".join(command[1:3]) if command[1] == "-m" else command[1] for command in commands()}
    assert {"-m mhc.data.train_tokenizer", "-m mhc.data.prepare", "-m mhc.grid", "-m eval.replay"} <= programs
    assert len(TRAIN) >= 7
    # Each of these really changes a command: the page still says it.
    said = {argument for command in commands() for argument in command}
    assert SAID.keys() <= said


@pytest.mark.parametrize("command", [command for command in TRAIN if "of_run" not in command[3]], ids=" ".join)
def test_the_config_of_a_command_is_valid(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [argument for argument in command[4:] if argument.startswith("--config.")]
    assert cli.load_config(command[3], overrides)


@pytest.mark.parametrize("command", [command for command in commands() if command[1] == "-m"], ids=" ".join)
def test_a_program_is_there_and_knows_its_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(command[2])
    if hasattr(module, "__path__"):  # a folder: what `python -m` runs is its __main__
        module = importlib.import_module(f"{command[2]}.__main__")
    part = [command[3]] if command[2] == "mhc.grid" else []
    with pytest.raises(SystemExit) as stopped:
        module.main([*part, "--help"])
    assert stopped.value.code == 0
    known = capsys.readouterr().out
    for argument in command:
        if argument.startswith("--") and not argument.startswith("--config"):
            assert re.search(rf"{argument}\b", known), argument


def test_the_grid_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = (command for command in commands() if command[1:4] == ["-m", "mhc.grid", "run"])
    assert len(plan.load(command[4], ()).arms) == 9


@pytest.mark.process
def test_every_command_runs(tmp_path: Path) -> None:
    """They run in the order of the page, in one folder, as for a new user."""
    for folder in ("corpus", "web", "code"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            texts = [
                f"the {folder} has line {line} of {number * line} lines, and {line**3} more" for line in range(300)
            ]
            lines = [json.dumps({"text": " ".join(texts[start : start + 5])}) for start in range(0, 300, 5)]
            (tmp_path / folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("configs", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": re.sub(r"\S*device_count=\d+", "", os.environ["XLA_FLAGS"]),
        "MHC_CACHE": str(tmp_path / "cache"),
    }

    def run(command: list[str]) -> None:
        program, target = command, "out"
        if ">" in command:
            program, target = command[: command.index(">")], command[-1]
        with (tmp_path / target).open("w") as out:
            program = [sys.executable, *program[1:]]
            done = subprocess.run(program, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-2000:]}"

    for command in commands():
        if command[1:4] == ["-m", "mhc.grid", "run"]:  # its model, smaller, on less text
            sizes = ("model.layers=1", "model.width=16", "data.sequence_length=16", "train.batch_size=4")
            source = ("data.source=text:corpus/*.jsonl", "monitor.probe_every=0", "validation.batches=1")
            command = [*command, *(f"--config.{field}" for field in (*sizes, *source))]
        run(small(command))

    runs = tmp_path / "runs"

    def metrics(name: str) -> list[dict[str, float]]:
        return list(read_jsonl(runs / name / "metrics.jsonl"))

    mixture = metrics("mixture")[-1]
    assert mixture["tokens/web"] + mixture["tokens/code"] == mixture["tokens"]
    assert {"val_loss/web", "val_loss/code"} <= mixture.keys()
    assert metrics("125m_decayed")[0]["loss"] == metrics("125m")[4]["loss"]
    assert metrics("125m_decayed")[-1]["lr"] == 0.0
    assert [row["tokens"] for row in metrics("125m_4k")] == [2 * 128 * step for step in range(1, 5)]
    assert metrics("few")[-1]["loss"] < 0.5 < metrics("few")[0]["loss"]
    assert len(list((runs / "wsd").glob("*,from=*/summary.json"))) == 6
