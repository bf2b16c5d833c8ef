"""Test the report's section of beliefs: it is read from eval.windtunnel's files, and shown for wind tunnels alone."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc.data.windtunnel import fields
from mhc.errors import UserError
from mhc.eval.compare import write as compare_module
from mhc.eval.compare.write import compare
from mhc.eval.windtunnel.leads import show
from mhc.eval.windtunnel.leads.bands import Trace
from mhc.eval.windtunnel.leads.reading import MEASURES
from mhc.files import write_json
from tests.eval.synthetic_runs import config, write_run

TASK = {name.replace(".", "__"): value for name, value in fields("windtunnel:bijection,symbols=8").items()}
STEPS = np.arange(10.0, 201.0, 10.0)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "draw", lambda *_: [])


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    """Return the folder of a plain and an hc arm on a wind tunnel."""
    for kind in ("plain", "hc"):
        write_run(tmp_path / "runs" / kind, config(kind, layers=2, **TASK))
    return tmp_path / "runs"


def page(folder: Path, **options: Any) -> str:
    return compare([folder], recompute_gains=False, **options).read_text()


def report() -> dict[str, Any]:
    """Return what ``--leads`` writes of six arms, of which one of hc leaves its band 40 steps before its loss event."""

    def arm(kind: str, rate: float, seed: int, values: np.ndarray, loss: int | None) -> Trace:
        every = {measure.name: values * -measure.worse for measure in MEASURES}
        events = {"spike": loss, "excess": None}
        return Trace(f"{kind},{rate},{seed}", kind, rate, (seed, seed), STEPS, every, events, last=300, window=32)

    steady = np.full(len(STEPS), 0.5)
    fallen = np.where(STEPS >= 100, -0.5, 0.5)
    arms = [arm(kind, 1e-3, seed, steady, None) for kind in ("plain", "hc") for seed in (0, 1)]
    return show.report([*arms, arm("plain", 0.1, 0, steady, None), arm("hc", 0.1, 0, fallen, 140)])


def test_leads_and_measures_stand_in_the_report(arms: Path) -> None:
    write_json(arms / "leads.json", report())
    bounds = {"value": 0.125, "low": 0.1, "high": 0.15}
    hc = {"seeds": 3, "kl_bits": bounds, "kl_bits_beyond_plain": {"value": -0.0625, "low": None, "high": None}}
    write_json(
        arms / "windtunnel.json",
        {"topologies": {"hc": hc | {"depth": {"r2": bounds, "r2_beyond_plain": None}}}, "checkpoints": []},
    )
    text = page(arms)
    assert text.count("<h2>Belief</h2>") == 1
    assert "0.125 (0.100 to 0.150)" in text and "-0.0625" in text and "depth: r2" in text
    for measure in MEASURES:
        cells = [row for row in text.split("<tr>") if html.escape(measure.words) in row and "40 to 40" in row]
        assert len(cells) == 1 and "40.0" in cells[0]
    assert "hc, lr 0.1" in text
    assert "1 of 6 arms" in text and "0 of 6 arms" in text


def test_without_files_the_report_says_how_to_make_them(arms: Path, tmp_path: Path) -> None:
    assert "--leads DIR" in page(arms)
    (tmp_path / "out").mkdir()
    write_json(tmp_path / "out/leads.json", report())
    assert "Lead over the loss" in page(arms, out=tmp_path / "out")


def test_runs_on_text_have_no_such_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.eval.test_compare import NO_BASELINES

    monkeypatch.setattr(compare_module, "baselines", lambda data: NO_BASELINES)
    write_run(tmp_path / "plain", config("plain", layers=2))
    write_run(tmp_path / "tunnel", config("hc", layers=2, **TASK))
    (tmp_path / "leads.json").write_text("no JSON")  # of something else: it is not opened
    assert "Belief" not in page(tmp_path)


@pytest.mark.parametrize("name", ["leads.json", "windtunnel.json"])
@pytest.mark.parametrize(
    "content",
    [
        *({}, {"topologies": None}, {"topologies": {"hc": {"kl_bits": 1, "kl_bits_beyond_plain": 2}}}),
        *({"topologies": [1]}, {"topologies": {"hc": 3}}, {"topologies": [{}], "measures": {"a": "b"}}),
        {"topologies": [], "measures": {}, "detectors": {"spike": ""}, "events": {"spike": "x"}, "arms": []},
    ],
)
def test_a_file_of_something_else_ends_in_a_line(arms: Path, name: str, content: Any) -> None:
    (arms / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{name}: is not a file of eval.windtunnel"):
        page(arms)
