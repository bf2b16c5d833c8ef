"""Test train.py as a user mistypes it: one line on stderr, exit code 2, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from mhc import cli
from mhc.config import Config
from mhc.errors import UserError

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.py")
PARTIAL = """from ml_collections import ConfigDict
def get_config(layers='3'):
    return ConfigDict({'model': {'layers': %s}})
"""


def load(*overrides: str, path: str = DEMO) -> Config:
    """Return the Config of a file and overrides."""
    parser = cli.Parser(example="", fields=cli.EVERY_FIELD)
    parser.add_argument("--workdir")
    return cli.load_config(path, overrides, parser)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run train.py in a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_overrides_reach_the_config() -> None:
    config = load("--config.residual.kind=hc", "--config.residual.n", "2", "-config.optimizer.clip_norm=None")
    assert (config.residual.kind, config.residual.n, config.optimizer.clip_norm) == ("hc", 2, None)
    assert load("--config.seed.init=1", "--config.seed.init=2").seed.init == 2
    assert load("--config.mesh.data", "-1").mesh.data == -1


def test_an_override_may_repair_what_the_file_combines(tmp_path: Path) -> None:
    file = tmp_path / "two_streams.py"
    file.write_text(
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'residual': {'n': 2}})\n"
    )
    config = load("--config.residual.kind=plain", "--config.residual.n=1", "--config.train.steps=7", path=str(file))
    assert (config.residual.n, config.train.steps) == (1, 7)


def test_a_text_after_the_file_goes_to_get_config(tmp_path: Path) -> None:
    file = tmp_path / "sized.py"
    file.write_text(PARTIAL % "int(layers)")
    assert load(path=str(file)).model.layers == 3
    assert load(path=f"{file}:5").model.layers == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--config.residual.kidn=hc", "did you mean residual.kind?"),
        ("--config.train.steps=abc", "train.steps: given 'abc', allowed: an int >= 1"),
        ("--config.train.steps", "a value is missing: optimiser steps [an int >= 1]"),
        ("--config.train=3", "train: is a group"),
        ("--workdri", "unknown argument --workdri (did you mean --workdir?)"),
        ("runs/a", "unknown argument runs/a"),
        ("--config", "unknown argument --config"),
    ],
)
def test_a_mistyped_override_is_told(override: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", "mine.py, line 1: invalid syntax"),
        ("import os\n", "mine.py: it defines no get_config()"),
        ("def get_config():\n    return 1 / 0\n", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("def get_config():\n    return {}\n", "mine.py: get_config() gives dict, allowed: ml_collections.ConfigDict"),
        ("import no_such_module\n", "mine.py, line 1: ModuleNotFoundError"),
        (PARTIAL % "'3'", "model.layers: given '3', allowed: an int >= 1"),
        (
            "from configs import default\ndef get_config():\n    default.get_config().train.stesp = 3\n",
            "mine.py, line 3: AttributeError",
        ),
    ],
)
def test_a_config_file_that_does_not_load_is_told_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path=str(file))
    assert words in str(caught.value)


def test_a_missing_config_file_is_told_with_its_neighbour() -> None:
    with pytest.raises(UserError, match=r"dmeo\.py: no such file \(did you mean .*demo\.py\?\)"):
        load(path=DEMO.replace("demo", "dmeo"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config"),
        (["--config", DEMO], "--workdir is required"),
        (["--config", DEMO, "--workdir"], "--workdir: expected one argument"),
        (["--config", DEMO, "--work", "a"], "unknown argument --work (did you mean --workdir?)"),
        (["--config", DEMO, "--workdir", f"{DEMO}/a"], "is a file, allowed: a folder that can be written"),
        (["--config", DEMO, "--workdir", DEMO], "is a file, allowed: a folder that can be written"),
        (["--config", DEMO, "--workdir", "gs://b/r"], "--workdir gs://b/r: no name of a bucket"),
        (
            ["--config", DEMO, "--config.residual.kind=plain", "--config.residual.n=2"],
            "residual.n: given 2, allowed: 1",
        ),
    ],
)
def test_train_refuses(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.run_main(train.main, arguments)
    assert left.value.code == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config.resdual.kind=hc", "--workdir", "a"],
        ["--config.train.steps=abc", "--workdir", "a"],
        ["--config.attention.heads=5", "--workdir", "a"],
    ],
)
def test_a_mistake_in_a_process_of_its_own(arguments: list[str], tmp_path: Path) -> None:
    done = run("--config", DEMO, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_told_without_waiting_for_jax() -> None:
    code = (
        "import sys, train\n"
        "try: train.main(['--config', 'configs/demo.py', '--config.train.steps=abc'])\n"
        "except Exception as error: print(type(error).__name__, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["UserError", "False"]


@pytest.mark.parametrize(("code", "leaves"), [(0, 0), (3, 3)])
def test_run_main_leaves_with_the_programs_code(code: int, leaves: int) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(lambda arguments: code, [])
    assert left.value.code == leaves


def test_an_interrupted_program_closes_what_is_open_and_leaves_the_interpreter_up() -> None:
    """The interpreter is not taken down, since it would crash beside a compilation in the background."""
    code = (
        "import atexit, threading, time\n"
        "from mhc import cli\n"
        "atexit.register(lambda: print('closed'))\n"
        "threading.Thread(target=time.sleep, args=[600]).start()\n"  # nor is anything waited for
        "def main(arguments):\n    raise KeyboardInterrupt\n"
        "cli.run_main(main, [])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "closed\n", "interrupted\n")


def test_a_run_does_not_go_into_a_grid(tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text("{}")
    with pytest.raises(UserError, match="it holds a grid, not a run"):
        train.main(["--config", DEMO, "--workdir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["grid.json"]


def test_run_main_shows_our_own_bugs_whole() -> None:
    def broken(arguments: Any) -> int:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        cli.run_main(broken, [])


def test_run_main_folds_a_message_into_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(arguments: Any) -> int:
        raise UserError("two\n  lines")

    with pytest.raises(SystemExit):
        cli.run_main(wrong, [])
    assert capsys.readouterr().err == "error: two lines\n"


def test_a_new_nested_workdir_is_writable_and_not_made(tmp_path: Path) -> None:
    cli.check_writable(str(tmp_path / "a" / "b"))
    assert not list(tmp_path.iterdir())
