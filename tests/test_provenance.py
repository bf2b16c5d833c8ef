"""Test run.json: what it holds, the notes where two starts differ, and that a run started from it is the same run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from mhc import provenance
from mhc.config import from_json
from mhc.errors import UserError
from mhc.files import read_json, write_json
from mhc.run_folder import lock
from mhc.sharding import make_mesh
from mhc.train import opened
from mhc.train import run as runs
from tests.small_runs import assert_equal_runs, config, resolved, run, snapshot

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def finished(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 12 steps, which tests must not change."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(config(corpus, "plain"), folder) == 0
    return folder


@pytest.fixture
def entry(finished: Path) -> dict[str, Any]:
    """Return the start of that run."""
    (start,) = read_json(finished / "run.json")["starts"]
    return dict(start)


# The file -------------------------------------------------------------------------------------------------------------


def test_a_start_is_recorded(finished, entry):
    assert from_json(json.dumps(read_json(finished / "run.json")["config"])) == from_json(
        (finished / "config.json").read_text()
    )
    assert entry["command"] == list(sys.orig_argv) and entry["step"] == 0
    assert entry["versions"]["jax"] == jax.__version__
    assert (entry["devices"]["platform"], entry["devices"]["count"], entry["devices"]["processes"]) == ("cpu", 1, 1)
    assert entry["environment"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert entry["data"]["tokenizer"] == "bytes-258" and len(entry["data"]["corpus"]) == 16


def test_a_run_started_from_it_is_the_same_bit_for_bit(finished, tmp_path, capsys):
    origin = provenance.read(finished)
    again = runs.Run(origin.config, tmp_path / "again", devices=jax.devices()[:1], origin=origin)
    assert again.execute() == 0
    assert_equal_runs(tmp_path / "again", finished)
    first, second = (provenance.read(folder).starts for folder in (finished, tmp_path / "again"))
    assert not provenance.differences(first[0], second[0]) and first[0]["config_hash"] == second[0]["config_hash"]
    assert "run.json" not in capsys.readouterr().err  # nothing to say


def test_prepared_data_has_the_hash_of_its_manifest(corpus, entry, tmp_path, monkeypatch):
    assert entry["data"]["manifest"] is None  # text
    monkeypatch.setattr(runs.Run, "_loop", lambda self, run: None)
    monkeypatch.setattr(runs.Run, "_finish", lambda self, run, log: 0)
    monkeypatch.setattr(opened, "manifest_hash", lambda data, source=None: f"of {source or data.source}")
    assert run(config(corpus, "plain"), tmp_path / "run") == 0
    assert provenance.read(tmp_path / "run").starts[0]["data"]["manifest"] == f"of {corpus}"


def test_what_differs_is_said_in_a_line_each(finished, tmp_path, capsys):
    origin = provenance.read(finished / "run.json")
    starts = json.loads(json.dumps(list(origin.starts)))
    starts[0]["versions"]["jaxlib"] = "0.0.1"
    starts[0]["devices"]["count"] = 3
    starts[0]["environment"]["XLA_FLAGS"] = "--xla_other=1"
    with pytest.MonkeyPatch.context() as patch:  # the notes come first
        patch.setattr(runs.Run, "_loop", lambda self, run: None)
        patch.setattr(runs.Run, "_finish", lambda self, run, log: 0)
        again = runs.Run(
            origin.config, tmp_path / "b", devices=jax.devices()[:1], origin=origin._replace(starts=starts)
        )
        assert again.execute() == 0
    lines = capsys.readouterr().err.splitlines()
    for name in ("jaxlib: 0.0.1 in ", "devices: 3 × cpu in ", "XLA_FLAGS: --xla_other=1 in "):
        assert sum(name in line and line.endswith(" here") for line in lines) == 1, name
    assert sum(line.endswith(" here") for line in lines) == 3
    assert [line.partition(" ")[2] for line in (tmp_path / "b" / "train.log").read_text().splitlines()] == lines


def test_each_start_is_added_and_a_change_is_said(corpus, finished, tmp_path, capsys, monkeypatch):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    assert run(config(corpus, "plain"), folder) == 0  # finished already: no start
    assert snapshot(folder).keys() == snapshot(finished).keys() and len(provenance.read(folder).starts) == 1
    stored = read_json(folder / "run.json")
    stored["starts"][0]["versions"]["flax"] = "0.0.2"
    write_json(folder / "run.json", stored)
    monkeypatch.setattr(runs.Run, "_loop", lambda self, run: None)
    monkeypatch.setattr(runs.Run, "_finish", lambda self, run, log: 0)
    assert run(config(corpus, "plain", train={"steps": 14}), folder) == 0
    assert "flax: 0.0.2 at the last start, " in capsys.readouterr().err
    again = provenance.read(folder)
    assert [start["step"] for start in again.starts] == [0, 12] and again.config.train.steps == 14
    assert len({start["config_hash"] for start in again.starts}) == 2
    now = provenance.start(again.config, make_mesh(again.config.mesh, jax.devices()[:1]), step=0, data={})
    assert [note for note in provenance.notes(now, (), again) if "config changed" in note]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ('{"steps": 3}', "not the run.json of a run"),
        ('{"format": 7, "config": {"model": {}}, "starts": [{}]}', "format 7, allowed: 1"),
        ('{"format": 1, "config": {"modell": {}}, "starts": [{}]}', "unknown group modell"),
    ],
)
def test_what_is_no_run_json_is_refused(content, words, tmp_path):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=words):
        provenance.read(tmp_path)


@pytest.mark.parametrize(
    "damage", [("versions", None), ("devices", "cpu"), ("data", None), ("config_hash", ...), (..., "x")]
)
def test_a_damaged_start_is_one_line(damage, finished, tmp_path):
    stored, (name, value) = read_json(finished / "run.json"), damage
    if name is ...:
        stored["starts"][0] = value
    elif value is ...:
        del stored["starts"][0][name]
    else:
        stored["starts"][0][name] = value
    write_json(tmp_path / "run.json", stored)
    with pytest.raises(UserError, match="start number 1 is damaged"):
        provenance.read(tmp_path)


@pytest.mark.parametrize("damage", [("optimizer", None), ("optimizer", "lr"), ("train", "steps")])
def test_a_config_that_is_not_the_start_s_is_refused(damage, finished, tmp_path):
    """A group or a field that is gone would be its default, in silence; so would an edit."""
    group, field = damage
    stored = read_json(finished / "run.json")
    if field is None:
        del stored["config"][group]
    else:
        stored["config"][group][field] *= 2
    write_json(tmp_path / "run.json", stored)
    with pytest.raises(UserError, match="its config is not the one of its last start"):
        provenance.read(tmp_path)


def test_processes_find_each_other_anew(finished, tmp_path):
    stored = read_json(finished / "run.json")
    stored["config"]["distributed"] |= {
        "cluster": "address",
        "coordinator": "host:1",
        "processes": 2,
        "process_id": 1,
    }
    write_json(tmp_path / "run.json", stored)
    origin = provenance.read(tmp_path)
    assert origin.config.distributed.cluster == "none"
    assert provenance.config_hash(from_json(json.dumps(stored["config"]))) == provenance.config_hash(origin.config)


@pytest.mark.process
def test_the_command_line_starts_from_it(finished, tmp_path):
    """Two processes: one from the file, one that changes a field too."""
    for name, more, steps in (("a", (), 12), ("b", ("--config.train.steps=3",), 3)):
        done = subprocess.run(
            [
                sys.executable,
                "train.py",
                "--from",
                str(finished / "run.json"),
                "--workdir",
                str(tmp_path / name),
                *more,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")},
        )
        assert done.returncode == 0, done.stderr
        assert read_json(tmp_path / name / "summary.json")["steps"] == steps
    assert_equal_runs(tmp_path / "a", finished)


# What is compared -----------------------------------------------------------------------------------------------------


def test_only_what_equal_runs_share_is_compared(entry):
    other = json.loads(json.dumps(entry))
    other |= {"time": "later", "step": 7, "command": ["x"], "folder": "/", "host": "another"}
    other["environment"] |= {"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}
    flags = other["environment"]["XLA_FLAGS"].split()
    other["environment"]["XLA_FLAGS"] = " ".join(reversed(flags))
    assert provenance.differences(entry, other) == {}


@pytest.mark.parametrize(
    ("group", "field", "name"),
    [
        ("versions", "optax", "optax"),
        ("devices", "processes", "processes"),
        ("devices", "cores", "cores"),
        ("options", "jax_default_matmul_precision", "jax_default_matmul_precision"),
        ("data", "corpus", "corpus"),
        ("data", "tokenizer", "tokenizer"),
        ("environment", "NCCL_ALGO", "NCCL_ALGO"),
    ],
)
def test_each_of_these_is_a_difference(group, field, name, entry):
    other = json.loads(json.dumps(entry))
    other[group][field] = "another"
    assert provenance.differences(entry, other) == {name: (entry[group].get(field), "another")}


def test_the_hash_of_a_config_is_of_every_field_but_how_processes_meet(corpus):
    first = resolved(config(corpus))
    assert provenance.config_hash(first) == provenance.config_hash(resolved(config(corpus)))
    assert provenance.config_hash(first) != provenance.config_hash(resolved(config(corpus, optimizer={"lr": 2e-2})))


# Code -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a committed package of that name."""
    (tmp_path / "mhc").mkdir()
    (tmp_path / "mhc" / "__init__.py").write_text("one = 1\n")
    for arguments in (
        ("init", "--quiet"),
        ("add", "mhc"),
        ("-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "-m", "first"),
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, timeout=60)
    return tmp_path


def test_a_clean_repository_is_its_commit(repository):
    record = provenance._code(repository)
    assert record is not None and len(record["commit"]) == 40
    assert (record["dirty"], record["changes"], record["diff"], record["untracked"]) == (False, None, "", [])


def test_changes_since_the_commit_are_kept(repository, monkeypatch):
    (repository / "mhc" / "__init__.py").write_text("one = 2\n")
    changed = provenance._code(repository)
    assert changed is not None and changed["dirty"] and "+one = 2" in changed["diff"] and not changed["diff_cut"]
    (repository / "mhc" / "new.py").write_text("two = 2\n")
    more = provenance._code(repository)
    assert more is not None and more["untracked"] == ["mhc/new.py"] and more["changes"] != changed["changes"]
    (repository / "mhc" / "new.py").write_text("two = 3\n")
    other = provenance._code(repository)
    assert other is not None and other["changes"] not in (more["changes"], changed["changes"])
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 10)
    cut = provenance._code(repository)
    assert cut is not None and len(cut["diff"]) == 10 and cut["diff_cut"] and cut["changes"] == other["changes"]


def test_code_outside_a_repository_has_no_commit(repository, tmp_path_factory, monkeypatch):
    assert provenance._code(tmp_path_factory.mktemp("plain")) is None
    (repository / "site").mkdir()  # an installed copy in somebody else's repository
    assert provenance._code(repository / "site") is None
    monkeypatch.setenv("PATH", "")  # no git
    assert provenance._code(repository) is None


# Deterministic programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "after"),
    [
        (None, "--xla_gpu_deterministic_ops=true"),
        ("--xla_a=1", "--xla_a=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops"),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_deterministic_ops=1",) * 2,
    ],
)
def test_deterministic_sets_the_flag_once(given, after, monkeypatch):
    environment = {} if given is None else {"XLA_FLAGS": given}
    provenance.make_deterministic(environment)
    assert environment == {"XLA_FLAGS": after}
    monkeypatch.setenv("XLA_FLAGS", after)
    assert provenance.is_deterministic()
    monkeypatch.setenv("XLA_FLAGS", given or "")
    assert provenance.is_deterministic() == (given == after)


def test_deterministic_against_the_user_s_own_flag_is_refused():
    environment = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}
    with pytest.raises(UserError, match=r"allowed: true"):
        provenance.make_deterministic(environment)
    assert environment == {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}


def test_deterministic_says_where_it_does_nothing(entry):
    def notes(**changes: Any) -> list[str]:
        return list(provenance.notes({**entry, **changes}, (), None))

    assert notes() == []
    (line,) = notes(deterministic=True)
    assert "no effect on cpu" in line
    assert notes(deterministic=True, devices={**entry["devices"], "platform": "gpu"}) == []


def test_a_held_folder_gets_no_start(finished, corpus):
    before = snapshot(finished)
    with lock(finished), pytest.raises(UserError, match="another process"):
        run(config(corpus, "plain"), finished)
    assert snapshot(finished) == before
