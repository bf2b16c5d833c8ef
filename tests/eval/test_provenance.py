"""Test warnings about arms that differ in more than what their comparison varies."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from mhc import config as configs
from mhc import provenance
from mhc.config import from_config_dict
from mhc.eval.compare import write as compare
from mhc.eval.compare.differences import unintended
from mhc.eval.compare.runs import Arm
from mhc.files import write_json
from mhc.grid import plan
from mhc.sharding import make_mesh
from tests.eval.synthetic_runs import config as synthetic
from tests.eval.synthetic_runs import write_run
from tests.small_runs import resolved, tiny

BASE = tiny("text:/nowhere/*.txt")


def arm(name: str, **fields: Any) -> Arm:
    """Return an arm with these fields, residual__kind=…, of the base."""
    tree = copy.deepcopy(BASE)
    for field, value in fields.items():
        group, leaf = field.split("__")
        tree.setdefault(group, {})[leaf] = value
    made = resolved(from_config_dict(tree))
    return Arm(name, Path(name), configs.to_dict(made), [{"step": 1}], [], None, starts=(start(made),))


def start(made: configs.Config) -> dict[str, Any]:
    """Return the record of a start of this process."""
    data = {"corpus": "c0", "tokenizer": "bytes-258"}
    return provenance.start(made, make_mesh(made.mesh, jax.devices()[:1]), step=0, data=data)


def changed(one: Arm, group: str, field: str, value: Any, *, only_then: bool = False) -> Arm:
    """Return the arm as if it had been started (or, ``only_then``, resumed) with another value."""
    other = copy.deepcopy(one.starts[0])
    other[group][field] = value
    return dataclasses.replace(one, starts=(one.starts[0], other) if only_then else (other,))


def grid(folder: Path, **arms: dict[str, Any]) -> Path:
    """Write a grid.json of arms."""
    made = plan.Plan("grid", "base.py", {}, configs.to_dict(from_config_dict(BASE)), arms)
    write_json(folder / "grid.json", dataclasses.asdict(made))
    return folder


KINDS = (arm("a", residual__kind="plain"), arm("b", residual__kind="mhc"), arm("c", residual__kind="hc"))


# Fields ---------------------------------------------------------------------------------------------------------------


def test_kinds_rates_and_seeds_alone_are_no_warning(tmp_path):
    """The fields that derive from them, such as streams and initial maps, give no warning either."""
    arms = [*KINDS, arm("d", residual__kind="hc", optimizer__lr=3e-3, seed__init=1, seed__data=1)]
    assert unintended(arms, None) == unintended(arms, tmp_path) == []


def test_another_field_is_named():
    (line,) = unintended([*KINDS, arm("d", optimizer__b2=0.99, head__tied=True, checkpoint__every=9)], None)
    assert line.startswith("The arms differ in more than the residual, the learning rate and the seeds: ")
    assert "head.tied" in line and "optimizer.b2" in line and "checkpoint" not in line


def test_a_grid_says_what_is_varied(tmp_path):
    arms = [arm("a", model__width=8), arm("b", model__width=16, mlp__width=None)]
    wider: dict[str, Any] = {"a": {"model.width": 8}, "b": {"model.width": 16, "mlp.width": None}}
    assert unintended(arms, grid(tmp_path, **wider)) == []  # attention.head_dim follows from it
    (line,) = unintended([arms[0], arm("b", model__width=16, optimizer__lr=0.5)], tmp_path)
    assert line == "The arms differ in more than what their grid varies: optimizer.lr."
    # Arms that are not the grid's are judged as any.
    (line,) = unintended([*arms, arm("c")], tmp_path)
    assert "model.width" in line


def test_a_grid_of_another_version_says_nothing(tmp_path):
    (tmp_path / "grid.json").write_text('{"arms": {}}')
    assert unintended(KINDS, tmp_path) == []


# Starts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "field", "value", "said"),
    [
        ("versions", "jax", "0.0.1", f"jax: {jax.__version__} (a, c); 0.0.1 (b)."),
        ("devices", "count", 4, "devices: 1 × cpu (a, c); 4 × cpu (b)."),
        ("data", "corpus", "c1", "corpus: c0 (a, c); c1 (b)."),
        ("environment", "NCCL_ALGO", "Ring", "NCCL_ALGO: none (a, c); Ring (b)."),
    ],
)
def test_a_start_unintended_the_others_is_said(group, field, value, said):
    arms = [KINDS[0], changed(KINDS[1], group, field, value), KINDS[2]]
    (line,) = unintended(arms, None)
    assert line.startswith("The arms were not all started alike: ")
    assert sorted(line.rpartition("alike: ")[2].rstrip(".").partition(": ")[2].split("; ")) == sorted(
        said.rstrip(".").partition(": ")[2].split("; ")
    )
    (line,) = unintended([changed(KINDS[0], group, field, value, only_then=True)], None)  # on its way
    assert " then " in line


def test_arms_without_a_record_are_named_where_others_have_one():
    old = [dataclasses.replace(one, starts=()) for one in KINDS]
    assert unintended(old, None) == []
    (line,) = unintended([*KINDS[:2], old[2]], None)
    assert line.startswith("There is no run.json of c")


def test_data_that_the_grid_varies_is_no_warning(tmp_path):
    arms = [KINDS[0], changed(KINDS[1], "data", "corpus", "c1")]
    fields = {"a": {"data.holdout": 0.1, "residual.kind": "plain"}, "b": {"data.holdout": 0.2, "residual.kind": "mhc"}}
    assert unintended(arms, grid(tmp_path, **fields)) == []


# The report -----------------------------------------------------------------------------------------------------------


def test_the_report_and_stderr_have_the_warning(tmp_path, monkeypatch, capsys):
    for kind in ("plain", "hc"):
        settings = synthetic(kind, steps=20, optimizer__b2=0.9 if kind == "hc" else 0.95)
        folder = write_run(tmp_path / kind, settings)
        made = start(settings)
        made["versions"] = {**made["versions"], "jax": f"0.0.{len(kind)}"}
        provenance.append(folder / "run.json", settings, made)
    monkeypatch.setattr(compare, "draw", lambda *arguments: [])
    page = compare.compare([tmp_path], recompute_gains=False).read_text()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2 and all(line.removeprefix("warning: ") in page for line in said)
    assert "optimizer.b2" in said[0] and "jax: 0.0.5 (plain); 0.0.2 (hc)" in said[1]
