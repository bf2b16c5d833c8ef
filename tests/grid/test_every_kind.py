"""Test that a grid takes every kind of the registry: sizes, arms that train, results, and their comparison."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from mhc import kinds
from mhc.eval.compare.__main__ import main as compare
from mhc.files import read_json, read_jsonl
from mhc.grid import estimate, plan
from mhc.grid.__main__ import main
from mhc.grid.collect import collect
from mhc.grid.plan import Plan
from tests.small_runs import run, tiny, write_corpus
from tests.state_forms import has_maps

OWN = tuple(name for name, kind in kinds.known().items() if kind.builder)
# An arm each beside those of the kinds alone: options that change what the state is, or what attention carries.
OPTIONS = (
    {"residual.kind": "mhc", "residual.single_pass": True},
    {"residual.kind": "attn_res", "residual.block": 2},
    {"residual.kind": "mhc", "residual.value_residual": True},
)


def planned(folder: Path) -> Plan:
    """Write a base config of two small blocks and four steps, and a grid of every kind; return its plan."""
    base = tiny(
        write_corpus(folder / "texts"),
        "plain",
        train={"steps": 4},
        checkpoint={"every": 4},
        validation={"every": 4, "batches": 1},
        monitor={"probe_every": 2, "probe_sequences": 2},
    )
    (folder / "base.py").write_text(
        "import json\nfrom ml_collections import ConfigDict\n\n\n"
        f"def get_config():\n    return ConfigDict(json.loads({json.dumps(base)!r}))\n"
    )
    (folder / "every.py").write_text(
        "from mhc.grid import *\n\n\ndef get_grid():\n"
        f"    kinds = axis('residual.kind', *{OWN!r})\n"
        f"    return Grid('base.py', product(seeds(0), chain(kinds, *map(arm, {OPTIONS!r}))))\n"
    )
    return plan.load(str(folder / "every.py"), ())


@pytest.mark.long
def test_sizes_of_every_kind_are_known_without_running_it(tmp_path: Path) -> None:
    grid = planned(tmp_path)
    costs = estimate.costs(grid, estimate.speed(None, "NVIDIA H100", 0.4))
    assert len(costs) == len(OWN) + len(OPTIONS)
    plain = costs["plain,seed=0"]
    for arm, cost in costs.items():
        assert cost.params >= plain.params and cost.flops >= plain.flops, arm
        if kinds.known()[grid.config(arm).residual.kind].parameters:
            assert cost.params != plain.params, arm


def test_an_option_that_the_base_does_not_have_is_collected(tmp_path: Path) -> None:
    """It has a value in arms of its kind, and none in others."""
    grid = planned(tmp_path)
    collect(grid, tmp_path / "runs", tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(encoding="utf-8") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert {name: rows[f"{name},seed=0"]["residual.single_pass"] for name in ("plain", "attn_res", "mhc")} == {
        "plain": "",
        "attn_res": "",
        "mhc": "False",
    }
    assert rows["mhc,residual.single_pass=True,seed=0"]["residual.single_pass"] == "True"
    assert rows["attn_res,residual.block=2,seed=0"]["residual.block"] == "2"
    assert {rows[f"{name},seed=0"]["residual.value_residual"] for name in OWN} == {"False"}


@pytest.mark.product
def test_every_kind_is_run_collected_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, workdir = planned(tmp_path), tmp_path / "runs"
    plan.store(grid, workdir)
    for arm in grid.arms:
        assert run(grid.placed(arm, workdir), workdir / arm) == 0, arm
    assert main(["collect", "--workdir", str(workdir)]) == 0
    with (workdir / "results.csv").open(encoding="utf-8") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert rows.keys() == grid.arms.keys()
    assert {row["state"] for row in rows.values()} == {"finished"}
    assert compare([str(workdir)]) == 0
    capsys.readouterr()
    summary = read_json(workdir / "summary.json")
    assert summary["arms"].keys() == grid.arms.keys()
    page = (workdir / "report.html").read_text()
    for arm, measures in summary["arms"].items():
        config = grid.config(arm)
        assert measures["kind"] == config.residual.kind and arm in page
        # What has no maps has no gains: they are left out, and are not 1.
        assert (measures["peak_forward_gain"] is None) == (not has_maps(config)), arm
        probe = read_jsonl(workdir / arm / "probes.jsonl")[-1]
        assert any(name.startswith("gain/") for name in probe) == has_maps(config), arm
