"""Compare runs: a report, figures, and a summary.

    python -m eval.compare RUN_OR_FOLDER [...] [--out DIR] [--no_recompute]

A folder that holds config.json is a run; in any other folder all runs below it are taken. report.html, summary.json,
figures/*.png and data/*.csv (what each figure draws, and the tables) go to the folder that the runs have in common, or
to --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mhc import cli, full_disk, remote
from mhc.config import DataConfig
from mhc.errors import UserError
from mhc.eval.compare import tables
from mhc.eval.compare.differences import unlike
from mhc.eval.compare.figures import CROWD, draw
from mhc.eval.compare.findings import findings
from mhc.eval.compare.ngram import baselines
from mhc.eval.compare.recompute import Recomputed, recompute
from mhc.eval.compare.report import render
from mhc.eval.compare.runs import Arm, load, measures
from mhc.eval.compare.spikes import history
from mhc.eval.compare.topologies import paired, topologies
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
    warnings += unlike(arms, root)
    everyone = topologies(arms)
    pairs = paired(everyone)
    histories = [history(arm) for arm in arms]
    if out is not None and remote.is_remote(out):
        raise UserError(f"--out: given {out}, allowed: a local folder")
    target = root if out is None else Path(out).resolve()
    if target is None:
        raise UserError("--out is needed where a run is in a store: a local folder for the report")
    _check_target(target)
    table = {arm.name: measures(arm) for arm in arms}
    recomputed: dict[str, Recomputed] | None = None
    if recompute_gains:
        recomputed = {}
        # Each is a model to compile: of many arms, one a topology.
        for arm in arms if len(arms) <= CROWD else [topology.arms[0] for topology in everyone]:
            _say(f"recomputing gains of {arm.name} …")
            recomputed[arm.name] = recompute(arm)
    _say("counting n-gram baselines …")
    models = baselines(_data_config(arms[0]))
    for one in histories:
        table[one.arm] |= {"loss_events": len(one.loss_events), "rewinds": len(one.rewinds)}
    for name, row in table.items():
        result = recomputed.get(name) if recomputed is not None else None
        row["recomputed_gain_difference"] = result.difference if result else None
        row["recomputed_gains"] = result.peaks if result else None
    found = findings(arms, table, models, recomputed, warnings, everyone, pairs, histories)
    for finding in found:
        if finding.warning:
            _say(f"warning: {finding.text}")
    summary: dict[str, Any] = {
        "arms": table,
        "topologies": {topology.label: tables.topology(topology, everyone, pairs) for topology in everyone},
        "baselines": {"unigram": models.unigram, "bigram": models.bigram},
        "findings": [finding.text for finding in found if not finding.warning],
        "warnings": [finding.text for finding in found if finding.warning],
    }
    if models.reason is not None:
        summary["baselines"]["reason"] = models.reason
    try:
        target.mkdir(parents=True, exist_ok=True)
        figures = draw(arms, everyone, pairs, histories, models, target / "figures", target / "data")
        tables.write(target / "data", everyone, pairs, histories)
        report = target / "report.html"
        page = render(_title(arms, target), arms, table, found, figures, models, recomputed, everyone, pairs, histories)
        report.write_text(page, "utf-8")
        write_json(target / "summary.json", summary)
    except OSError as error:
        where = error.filename or target
        if full_disk.reason(error) is not None:
            with full_disk.reporting(where, target):
                raise
        advice = "; give --out another folder" if out is None else ""
        raise UserError(f"{where}: cannot be written ({error.strerror}){advice}") from None
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Raises DiskFull where the disk is full."""
    parser = _Parser(
        prog="python -m eval.compare", description="Compare runs: report.html, summary.json, figures/*.png, data/*.csv."
    )
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_FOLDER", help="a run, or a folder with runs below it")
    parser.add_argument(
        "--out", metavar="DIR", help="where the results go (default: the folder the runs have in common)"
    )
    parser.add_argument(
        "--no_recompute", action="store_true", help="do not recompute the gains from the final checkpoints"
    )
    try:
        options = parser.parse_args(arguments)
        report = compare(options.paths, options.out, recompute_gains=not options.no_recompute)
    except full_disk.DiskFull:
        raise
    except UserError as error:
        _say(f"error: {error}")
        return 2
    print(report)
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one line, like every other of the user's mistakes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _check_target(target: Path) -> None:
    """Refuse to write over a run, or over a summary.json that is not a comparison's."""
    if (target / "config.json").exists():
        raise UserError(f"{target}: is a run, whose summary.json must stay; give --out another folder")
    if (target / "summary.json").exists() and "arms" not in read_json(target / "summary.json"):
        raise UserError(
            f"{target / 'summary.json'}: is not a comparison's and would be lost; give --out another folder"
        )


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


if __name__ == "__main__":
    cli.run_main(main)
