"""Write a comparison of runs: report.html, summary.json, figures and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc import full_disk, remote
from mhc.config import DataConfig
from mhc.errors import UserError
from mhc.eval.compare import tables
from mhc.eval.compare.beliefs import read as read_beliefs
from mhc.eval.compare.comparison import Comparison, comparison_of, representatives
from mhc.eval.compare.differences import unintended
from mhc.eval.compare.figures.draw import draw
from mhc.eval.compare.findings import Finding, findings
from mhc.eval.compare.ngram import baselines
from mhc.eval.compare.recompute import Recomputed, recompute
from mhc.eval.compare.report.page import render
from mhc.eval.compare.runs import Arm, load
from mhc.files import read_json, write_json


def compare(paths: Sequence[str | Path], out: str | Path | None = None, *, recompute_gains: bool = True) -> Path:
    """Write report.html, summary.json, figures/ and data/ for the runs in or under ``paths``.

    Args:
        paths: run folders, or folders with runs below them.
        out: where the results go; None: the folder that the runs have in common.
        recompute_gains: load every arm's last checkpoint and measure its gains anew.

    Returns:
        The path of report.html.

    Raises:
        UserError: no run, a file that cannot be read or written, or an ``out`` that is itself a run.
    """
    root, arms, warnings = load(paths)
    warnings += unintended(arms, root)
    target = _target(root, out)
    recomputed: dict[str, Recomputed] | None = None
    if recompute_gains:
        recomputed = {}
        for arm in representatives(arms):  # each is a model to compile
            _say(f"recomputing gains of {arm.name} …")
            recomputed[arm.name] = recompute(arm)
    beliefs = read_beliefs(arms, (target, root))
    _say("counting n-gram baselines …")
    comparison = comparison_of(arms, baselines(_data_config(arms[0])), recomputed, warnings, beliefs)
    statements = findings(comparison)
    for finding in statements:
        if finding.warning:
            _say(f"warning: {finding.text}")
    try:
        target.mkdir(parents=True, exist_ok=True)
        figures = draw(comparison, target / "figures", target / "data")
        tables.write(comparison, target / "data")
        report = target / "report.html"
        report.write_text(render(_title(arms, target), comparison, statements, figures), "utf-8")
        write_json(target / "summary.json", summary(comparison, statements))
    except OSError as error:
        where = error.filename or target
        if full_disk.reason(error) is not None:
            with full_disk.reporting(where, target):
                raise
        advice = "; give --out another folder" if out is None else ""
        raise UserError(f"{where}: cannot be written ({error.strerror}){advice}") from None
    return report


def summary(comparison: Comparison, statements: Sequence[Finding]) -> dict[str, Any]:
    """Return the content of summary.json."""
    models = comparison.baselines
    return {
        "arms": comparison.measures,
        "topologies": {topology.label: tables.row_of(topology, comparison) for topology in comparison.topologies},
        "baselines": {
            "unigram": models.unigram,
            "bigram": models.bigram,
            **({} if models.reason is None else {"reason": models.reason}),
        },
        "findings": [finding.text for finding in statements if not finding.warning],
        "warnings": [finding.text for finding in statements if finding.warning],
    }


def _target(root: Path | None, out: str | Path | None) -> Path:
    """Return the folder for the results. Raises UserError if something in it would be lost."""
    if out is not None and remote.is_remote(out):
        raise UserError(f"--out: given {out}, allowed: a local folder")
    target = root if out is None else Path(out).resolve()
    if target is None:
        raise UserError("--out is needed where a run is in a store: a local folder for the report")
    if (target / "config.json").exists():
        raise UserError(f"{target}: is a run, whose summary.json must stay; give --out another folder")
    if (target / "summary.json").exists() and "arms" not in read_json(target / "summary.json"):
        raise UserError(
            f"{target / 'summary.json'}: is not a comparison's and would be lost; give --out another folder"
        )
    return target


def _data_config(arm: Arm) -> DataConfig:
    try:
        return DataConfig(**arm.config["data"])
    except TypeError as error:
        raise UserError(f"{arm.path / 'config.json'}: data is not of this version ({error})") from error


def _title(arms: Sequence[Arm], target: Path) -> str:
    kinds = list(dict.fromkeys(arm.kind for arm in arms))
    return f"{target.name or 'runs'}: {', '.join(kinds)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
