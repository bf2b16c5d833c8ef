"""Test kinds from elsewhere: a run stores what to import, and every program that reads the run imports it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mhc import cli, kind_table, kinds, provenance, residual
from mhc import config as configs
from mhc.config import from_config_dict, from_json, resolve, to_json
from mhc.errors import UserError
from mhc.eval.compare import runs
from mhc.files import read_json, read_jsonl
from mhc.grid import plan
from mhc.train.checkpoint import find_checkpoint, load_run
from tests.contracts.topologies import registry_restored

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/adding_a_topology.md").read_text("utf-8")

# A kind of one option, by a builder of this project's.
MODULE = """
from mhc import residual
from mhc.residual.plain import PlainResidual

def slower(width, *, rngs=None, n=None, collapse=None, brake=2.0):
    return PlainResidual(width, scale=1.0 / brake)

residual.register(
    residual.Kind(
        "slower",
        streams=(1,),
        collapses=("mean",),
        options={"brake": residual.Option("how much", default=2.0, above=0)},
    ),
    slower,
)
"""


@pytest.fixture(autouse=True)
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder of its own; forget what is registered, the modules that did it, and where they were found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    with registry_restored():
        yield
    for name in set(sys.modules) - before:
        if name.startswith("their") or name == "ring":
            del sys.modules[name]


def config_of(**fields: Any) -> configs.Config:
    return from_config_dict({"residual": {"module": "their_kind", "kind": "slower", **fields}})


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget the module and its kind, as another process has not loaded them."""
    with registry_restored():
        loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("their")}
        for table in (kind_table._KINDS, kind_table._OPTIONS, kind_table._MODULES):
            for name in ("slower", "brake"):
                table.pop(name, None)
        residual.protocol._REGISTRY.pop("slower", None)
        yield
    sys.modules.update(loaded)


def test_a_config_imports_the_module_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "their_kind.py").write_text(MODULE)
    config = resolve(config_of(brake=4.0), 32)
    assert config.residual.brake == 4.0
    text, sent = to_json(config), pickle.dumps(config)
    for read in (lambda: from_json(text), lambda: pickle.loads(sent)):
        with forgotten():
            assert "slower" not in kinds.names()
            assert read().residual.brake == 4.0
            assert "slower" in residual.kinds()


def test_a_kind_that_a_config_file_imports_is_stored_with_its_module(tmp_path: Path) -> None:
    """The run of a config file that says `import their_kind` can be read by programs that do not."""
    (tmp_path / "their_kind.py").write_text(MODULE)
    (tmp_path / "file.py").write_text(
        "import their_kind\nfrom configs import default\n"
        "def get_config():\n    c = default.get_config()\n    c.residual.kind = 'slower'\n    c.residual.brake = 3.0\n"
        "    return c\n"
    )
    sys.path.append(str(tmp_path))
    config = resolve(cli.load_config("file.py", []), 32)
    assert config.residual.module == "their_kind"
    assert configs.is_derived(config, "residual.module")
    back = configs.change(config, {"residual.kind": "plain"})
    assert back.residual.module is None and "brake" not in back.residual.flat()


@pytest.mark.parametrize("joined", [True, False])
def test_the_command_line_names_the_module_before_or_after_its_options(tmp_path: Path, joined: bool) -> None:
    (tmp_path / "their_kind.py").write_text(MODULE)
    given = ["--config.residual.brake=5", "--config.residual.module=their_kind", "--config.residual.kind=slower"]
    arguments = given if joined else [part for argument in given for part in argument.split("=")]
    config = cli.load_config(str(ROOT / "configs/demo.py"), arguments)
    assert config.residual.brake == 5.0
    assert any(
        line.startswith("residual.brake = 2.0  # how much [a float > 0]") for line in cli.field_lines("residual")
    )


MISSING = "residual.module: no module their_absent, allowed: one that Python finds"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("their_absent", None, MISSING),
        ("their_kind.py", MODULE, r"given 'their_kind.py', allowed: names of modules .* (did you mean their_kind?)"),
        ("../their_kind", MODULE, "given '../their_kind', allowed: names of modules"),
        ("", None, "given '', allowed: names of modules"),
        ("their_kind,,", MODULE, "given 'their_kind,,', allowed: names of modules"),
        ("their_kind", "import their_other\n", "importing their_kind failed (.*their_kind.py, line 1): .*their_other"),
        ("their_kind", "\nx = 1 / 0\n", "importing their_kind failed (.*their_kind.py, line 2): ZeroDivisionError"),
        ("their_kind", "open('absent.txt')\n", "line 1): FileNotFoundError: [Errno 2] No such file or directory"),
        ("their_kind", "import sys\nsys.exit(3)\n", "line 2): SystemExit: 3"),
        ("their_kind", "x = 1\n", "given 'slower', allowed: one of plain.*; their_kind registers no other"),
        ("their_kind", "{}['absent']\n", "line 1): KeyError: absent"),
        ("their_kind", "def f(:\n", "importing their_kind failed (.*their_kind.py, line 1): SyntaxError"),
        ("their_kind", MODULE.replace("slower", "mhc"), "ValueError: residual kind 'mhc' is already registered"),
        ("their_kind", MODULE.replace('"brake"', '"iters"'), "ValueError: option 'iters' .*"),
        ("their_kind", MODULE.replace('"slower"', '"other"'), "residual.kind: given 'slower', allowed: one of plain"),
    ],
)
def test_a_module_that_does_not_serve_is_one_line(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "their_kind.py").write_text(text)
    with pytest.raises(UserError) as caught:
        from_config_dict({"residual": {"module": name, "kind": "slower"}})
    assert "\n" not in str(caught.value)
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), str(caught.value)), str(caught.value)


def test_a_run_stores_the_module_that_registered_its_kind_whatever_else_is_named(tmp_path: Path) -> None:
    """A module that only leads to it may not do so next time; one that registers nothing never does."""
    (tmp_path / "their_kind.py").write_text(MODULE)
    (tmp_path / "their_other.py").write_text("import their_kind\n")
    config = resolve(from_config_dict({"residual": {"module": "their_other", "kind": "slower"}}), 32)
    assert config.residual.module == "their_other,their_kind"
    assert resolve(config, 32) == config
    with forgotten():
        (tmp_path / "their_other.py").write_text("")
        assert from_json(to_json(config)) == config
    with pytest.raises(UserError, match=r"residual\.module: given 5, allowed: names of modules"):
        from_config_dict({"residual": {"module": 5, "kind": "slower", "brake": 2.0}})
    with pytest.raises(UserError, match=r"; residual\.module names what registers others$"):
        from_config_dict({"residual": {"kind": "slow"}})


CONFIG = """
from configs import demo

def get_config():
    config = demo.get_config()
    config.residual.update({"module": "their_kind", "kind": "slower"})
    return config
"""
GRID = """
from mhc.grid import Grid, axis, product

def get_grid():
    return Grid("mine.py", product(axis("residual.brake", 3.0, 4.0)))
"""


@pytest.mark.parametrize("imported", [False, True])
def test_a_module_beside_the_config_file_is_found(tmp_path: Path, imported: bool) -> None:
    """It is found whether the config names it or imports it, from any working directory; a grid's arms find it too."""
    beside = tmp_path / "configs_of_mine"
    beside.mkdir()
    (beside / "their_kind.py").write_text(MODULE)
    (beside / "mine.py").write_text(f"import their_kind\n{CONFIG}" if imported else CONFIG)
    (beside / "many.py").write_text(GRID)
    config = cli.load_config(str(beside / "mine.py"), ["--config.residual.brake=5"])
    assert config.residual.brake == 5.0
    stored = plan.store(plan.load(str(beside / "many.py"), []), tmp_path / "grid")
    assert [arm["residual.brake"] for arm in stored.arms.values()] == [3.0, 4.0]
    sys.path[:] = [entry for entry in sys.path if entry != str(beside)]  # another process: that of an arm
    with forgotten():
        assert plan.read(tmp_path / "grid").config(next(iter(stored.arms))).residual.kind == "slower"


def test_the_working_directory_comes_before_the_config_file_s_folder(tmp_path: Path) -> None:
    """A run that was begun with one module goes on with the same one."""
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    (tmp_path / "their_kind.py").write_text(MODULE)
    (beside / "their_kind.py").write_text("raise RuntimeError('the other one')")
    (beside / "mine.py").write_text(CONFIG)
    assert cli.load_config(str(beside / "mine.py"), []).residual.kind == "slower"


def test_a_missing_module_is_told_with_the_run_that_needs_it(tmp_path: Path) -> None:
    (tmp_path / "their_kind.py").write_text(MODULE)
    run = tmp_path / "run"
    run.mkdir()
    config = resolve(config_of(), 32)
    (run / "config.json").write_text(to_json(config))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    entry = {"config_hash": provenance.config_hash(config), "deterministic": False, "versions": {}, "environment": {}}
    entry |= {"code": None, "options": {}, "data": {}, "processes": 1}
    entry["devices"] = {"count": 1, "kind": "", "mesh": {}, "processes": 1, "platform": "", "runtime": "", "system": ""}
    provenance.append(run / "run.json", config, entry)
    grid = plan.Plan("g", "base.py", {}, configs.to_dict(config), {})
    (tmp_path / "grid").mkdir()
    plan.store(grid, tmp_path / "grid")
    (tmp_path / "their_kind.py").unlink()
    line = "residual.module: no module their_kind, allowed: one that Python finds, on PYTHONPATH, in the working "
    line += "directory or beside the config file"
    readers: tuple[tuple[Callable[[], Any], Path], ...] = (
        (lambda: find_checkpoint(run), run / "config.json"),
        (lambda: runs.load([run]), run / "config.json"),
        (lambda: provenance.read(run), run / "run.json"),
        (lambda: plan.read(tmp_path / "grid"), tmp_path / "grid/grid.json"),
        (lambda: cli.load_config(f"{ROOT}/configs/of_run.py:{run}", []), run / "config.json"),
    )
    with forgotten():
        for read, file in readers:
            with pytest.raises(UserError, match=f"{re.escape(f'{file}: {line}')}$"):
                read()


# The page, to the word ------------------------------------------------------------------------------------------------

# Appended to what trains, so that the demo's model of minutes takes seconds.
SMALL = [
    f"--config.{field}"
    for field in (
        *("model.layers=2", "model.width=16", "attention.heads=2", "data.sequence_length=32"),
        *(
            "train.batch_size=4",
            "checkpoint.every=10",
            "validation.batches=2",
            "schedule.warmup_steps=0",
            "schedule.kind=constant",
        ),
    )
]


@pytest.mark.process
def test_the_commands_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    """The page trains, resumes, compares, evaluates, exports, replays and runs a grid, in processes of their own."""
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        first = block.partition("\n")[0]
        if first.startswith("# ") and first.endswith(".py"):
            (tmp_path / first.removeprefix("# ")).write_text(block)
    shell = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line) for line in shell.splitlines()]
    assert [command[:3] for command in commands if "-m" in command] == [
        ["python", "-m", name]
        for name in (
            *("eval.compare", "eval.perplexity", "eval.mappings", "mhc.interop.export", "eval.replay", "mhc.grid"),
        )
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MHC_CACHE": str(tmp_path / "cache")}
    environment.pop("XLA_FLAGS", None)  # the eight devices of the tests
    trained = 0
    for command in commands:
        arguments = [str(ROOT / part) if part == "train.py" else part for part in command[1:]]
        if "train.py" in command:
            trained += 1
            arguments += [*SMALL, f"--config.train.steps={10 * trained}"]  # the second resumes the first
        if "mhc.grid" in command:
            arguments += [*SMALL, "--config.train.steps=4"]
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr[-2000:]}"
    run = tmp_path / "runs/ring"
    stored = read_json(run / "config.json")["residual"]
    assert (stored["module"], stored["kind"], stored["shifts"], stored["places"]) == ("ring", "ring", 2.0, 1)
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(1, 21))
    assert "ring" in (tmp_path / "runs/ring_report/report.html").read_text("utf-8")
    assert json.loads((tmp_path / "runs/ring_report/summary.json").read_text())["arms"]
    arms = sorted(path.parent.name for path in (tmp_path / "runs/ring_grid").glob("*/summary.json"))
    assert len(arms) == 2 and all("shifts" in arm for arm in arms), arms
    # The exported file alone gives what the run's decoder gives.
    code = (
        "import sys, json, numpy as np; sys.path.insert(0, 'runs/ring_export'); from model import load; "
        "print(json.dumps(load('runs/ring_export')(np.arange(12)[None]).tolist()))"
    )
    alone = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    sys.path.append(str(tmp_path))
    logits = np.asarray(load_run(run).decoder()(jnp.arange(12)[None]))
    assert np.abs(np.asarray(json.loads(alone.stdout)) - logits).max() <= 1e-4 * np.abs(logits).max()
