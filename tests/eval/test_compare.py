"""Test the comparison on made-up runs (synthetic_runs.py): what it reads and says, and that the report stands alone."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import shutil
import struct
import sys
import types
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc import cli
from mhc import config as configs
from mhc.config import DataConfig
from mhc.errors import UserError
from mhc.eval.common.palette import Style
from mhc.eval.common.sheet import envelope
from mhc.eval.common.words import number
from mhc.eval.compare import write as compare_module
from mhc.eval.compare.__main__ import main
from mhc.eval.compare.comparison import comparison_of
from mhc.eval.compare.figures.main import grad_norm, loss_gap
from mhc.eval.compare.figures.series import Gallery, smooth, styles
from mhc.eval.compare.findings import findings
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.recompute import gain_difference, recompute
from mhc.eval.compare.runs import Arm, gap_to_plain, load, measures, reference_arms
from mhc.eval.compare.topologies import topologies
from mhc.eval.compare.write import compare
from mhc.files import JsonlWriter, read_json, read_jsonl, write_json
from mhc.full_disk import DiskFull
from tests.eval.synthetic_runs import GAINS, config, crossed, demo, grid, probe, rewound, spike, write_run
from tests.small_runs import small_disk

OLD_FIGURES = {
    *("loss", "validation", "loss_gap", "grad_norm", "seeds", "cost"),
    *("gain_steps", "gain_depth_last", "gain_depth_peak", "gain_heat", "ds_error"),
}
FIGURES = OLD_FIGURES | {
    *("mix_depth", "diversity_steps", "diversity_depth", "activations", "attention", "gradients", "grad_heat"),
}
TABLES = {"topologies", "rates", "seeds_paired", "events", "monitors", "actions"}
NO_BASELINES = Baselines(None, None, "none asked for")
SCHEMA = {
    "kind",
    "val_loss",
    "bits_per_byte",
    "peak_forward_gain",
    "peak_backward_gain",
    "max_grad_norm",
    "spike_score_loss",
    "tokens_per_second",
    "seconds",
    "params",
    "recomputed_gain_difference",
}


def arms_in(root: Path) -> list[Arm]:
    return load([root])[1]


def said(arms: list[Arm], **changes: Any) -> list[str]:
    """Return all sentences about the arms, with recomputation left out."""
    return [finding.text for finding in findings(comparison_of(arms, **{"baselines": NO_BASELINES} | changes))]


def gallery_of(arms: list[Arm]) -> Gallery:
    return Gallery(comparison_of(arms, NO_BASELINES))


@dataclasses.dataclass(frozen=True)
class Loaded:
    folder: Path
    step: int


def install_checkpoints(monkeypatch: pytest.MonkeyPatch, error: float = 0.0, step: int | None = None) -> None:
    """Replace the checkpoint reader and the probe by stand-ins that return the synthetic gains, off by ``error``."""

    def load_run(folder: Path, step_asked: int | None = None) -> Loaded:
        if not (folder / "summary.json").exists():
            raise UserError(f"{folder}: no checkpoint")
        return Loaded(folder, step if step is not None else read_json(folder / "config.json")["train"]["steps"])

    def probe_run(loaded: Loaded, preset: str | None = None) -> dict[str, np.ndarray]:
        stored = read_json(loaded.folder / "config.json")
        settings = config(
            stored["residual"]["kind"],
            layers=stored["model"]["layers"],
            steps=stored["train"]["steps"],
            residual__sinkhorn=preset or stored["residual"].get("sinkhorn", "paper"),
        )
        return {key: (1 + error) * np.asarray(probe(settings, loaded.step)[key]) for key in GAINS}

    checkpoint, probes = types.ModuleType("mhc.train.checkpoint"), types.ModuleType("mhc.eval.compare.probe_again")
    checkpoint.load_run, probes.probe_run = load_run, probe_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mhc.train", types.ModuleType("mhc.train"))
    monkeypatch.setitem(sys.modules, "mhc.train.checkpoint", checkpoint)
    monkeypatch.setitem(sys.modules, "mhc.eval.compare.probe_again", probes)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole comparison of three arms."""
    root = demo(tmp_path_factory.mktemp("runs") / "demo")
    with pytest.MonkeyPatch.context() as patch:
        install_checkpoints(patch, error=1e-6)
        patch.setattr(compare_module, "baselines", lambda data: Baselines(4.6, 3.6, None, 1000, 100))
        assert compare([root]) == root / "report.html"
    return root


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out figures and corpus, for tests of everything else."""
    monkeypatch.setattr(compare_module, "draw", lambda *_: [])
    monkeypatch.setattr(compare_module, "baselines", lambda data: NO_BASELINES)


# -- the report ---------------------------------------------------------------------------------------------------


def test_report_holds_every_figure_and_asks_for_nothing_outside(report: Path) -> None:
    page = (report / "report.html").read_text("utf-8")
    files = sorted((report / "figures").glob("*.png"))
    assert {file.stem for file in files} == FIGURES
    assert {file.stem for file in (report / "data").glob("*.csv")} == FIGURES | TABLES
    inline = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert sorted(map(base64.b64decode, inline)) == sorted(file.read_bytes() for file in files)
    assert len(re.findall(r"\b(?:src|href|srcset|action)\s*=", page)) == len(files)
    assert "://" not in page and "@import" not in page and "url(" not in page and "<script" not in page


def test_figures_are_twice_as_dense_as_the_page_shows_them(report: Path) -> None:
    for file in (report / "figures").glob("*.png"):
        (width,) = struct.unpack(">I", file.read_bytes()[16:20])
        assert width == (1060 if file.stem in ("loss", "validation", "loss_gap", "grad_norm", "seeds") else 2160), file


def test_report_is_well_formed(report: Path) -> None:
    class Balance(HTMLParser):
        open: list[str] = []  # noqa: RUF012
        texts = ""

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "img", "br", "wbr", "line"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag != "line":
                assert self.open.pop() == tag

        def handle_data(self, data: str) -> None:
            self.texts += data

    parser = Balance()
    parser.feed((report / "report.html").read_text("utf-8"))
    parser.close()
    assert not parser.open
    assert "How to read this" in parser.texts and "one seed" in parser.texts


def test_summary_has_the_schema_and_strict_json(report: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    summary = json.loads((report / "summary.json").read_text(), parse_constant=refuse)
    assert list(summary["arms"]) == ["plain", "hc", "mhc"]
    assert summary["baselines"] == {"unigram": 4.6, "bigram": 3.6}
    for name, arm in summary["arms"].items():
        assert set(arm) >= SCHEMA
        assert all(arm[key] is not None for key in SCHEMA)
        assert arm["kind"] == name
        run = read_json(report / name / "summary.json")
        for key in ("val_loss", "bits_per_byte", "seconds", "params"):
            assert arm[key] == run[key]
        metrics = read_jsonl(report / name / "metrics.jsonl")
        assert arm["max_grad_norm"] == max(row["grad_norm"] for row in metrics)
        probes = read_jsonl(report / name / "probes.jsonl")
        for way in ("forward", "backward"):
            assert arm[f"peak_{way}_gain"] == max(max(row[f"gain/{way}_composite_mean"]) for row in probes)
        assert arm["recomputed_gain_difference"] == pytest.approx(1e-6, rel=1e-3)
    assert summary["arms"]["plain"]["peak_forward_gain"] == summary["arms"]["plain"]["peak_backward_gain"] == 1


def test_mhc_is_shown_under_both_presets(report: Path) -> None:
    gains = read_json(report / "summary.json")["arms"]["mhc"]["recomputed_gains"]
    assert set(gains) == {"paper", "deepseek"}
    assert gains["paper"]["backward"] == gains["deepseek"]["forward"] > 1.05
    assert gains["paper"]["forward"] == gains["deepseek"]["backward"] == pytest.approx(1.0, abs=1e-5)


def test_a_second_comparison_overwrites_the_first(report: Path, quick: None, tmp_path: Path) -> None:
    again = tmp_path / "demo"
    shutil.copytree(report, again)
    assert main([str(again), "--no_recompute"]) == 0
    summary = read_json(again / "summary.json")
    assert summary["arms"]["hc"]["recomputed_gain_difference"] is None
    assert any("--no_recompute" in text for text in summary["findings"])
    assert "--no_recompute" in (again / "report.html").read_text()


def test_names_are_escaped(tmp_path: Path, quick: None) -> None:
    write_run(tmp_path / "<b>&x", config("plain", steps=20))
    page = compare([tmp_path], recompute_gains=False).read_text()
    assert "&lt;b&gt;&amp;x" in page and "<b>&x" not in page


# -- reading runs -------------------------------------------------------------------------------------------------


def test_runs_are_found_at_any_depth_and_named_from_the_common_root(tmp_path: Path) -> None:
    for name in ("a/mhc_10", "a/mhc_9", "b/c/plain", ".hidden/hc"):
        write_run(tmp_path / name, config(name.split("/")[-1].split("_")[0], steps=20))
    write_run(tmp_path / "b/c/plain/checkpoints/copy", config("hc", steps=20))
    root, arms, warnings = load([tmp_path])
    assert (root, warnings) == (tmp_path, [])
    assert [arm.name for arm in arms] == ["b/c/plain", "a/mhc_9", "a/mhc_10"]
    root, arms, _ = load([tmp_path / "a/mhc_9", tmp_path / "b", tmp_path / "a"])
    assert root == tmp_path and [arm.name for arm in arms] == ["b/c/plain", "a/mhc_9", "a/mhc_10"]
    root, arms, _ = load([tmp_path / "a/mhc_9"])
    assert root == tmp_path / "a" and [arm.name for arm in arms] == ["mhc_9"]


def test_an_unfinished_run_with_a_torn_tail_is_reported(tmp_path: Path, quick: None) -> None:
    write_run(tmp_path / "plain", config("plain", steps=40))
    folder = write_run(tmp_path / "hc", config("hc", steps=40), until=25)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":26,"lo')
    page = compare([tmp_path], recompute_gains=False).read_text()
    assert "unfinished" in page and "step 25 of 40" in page
    arm = read_json(tmp_path / "summary.json")["arms"]["hc"]
    assert arm["finished"] is False and arm["steps"] == 25 and arm["params"] is None


def test_a_run_that_has_not_logged_is_left_out_with_a_warning(tmp_path: Path, quick: None) -> None:
    write_run(tmp_path / "plain", config("plain", steps=20))
    (tmp_path / "hc").mkdir()
    write_json(tmp_path / "hc" / "config.json", configs.to_dict(config("hc")))
    assert "hc is left out" in compare([tmp_path], recompute_gains=False).read_text()
    assert list(read_json(tmp_path / "summary.json")["arms"]) == ["plain"]


def test_a_diverged_run_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", config("plain", steps=40))
    folder = write_run(tmp_path / "hc", config("hc", steps=40), until=39)
    log = JsonlWriter(folder / "metrics.jsonl")
    log.write(
        {"step": 40, "loss": math.nan, "grad_norm": math.inf, "val_loss": math.nan, "val_bits_per_byte": math.nan}
    )
    log.close()
    arms = arms_in(tmp_path)
    row = measures(arms[1])
    assert math.isnan(row["val_loss"]) and row["max_grad_norm"] == math.inf
    assert row["spike_score_loss"] == 1 / 40
    sentences = said(arms)
    assert "Non-finite losses or gradients occurred in hc." in sentences
    assert sentences[0].startswith("plain has the lowest validation bits per byte")


def test_without_probes_gains_are_unknown_except_for_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "baselines", lambda data: NO_BASELINES)
    for kind in ("plain", "hc"):
        write_run(tmp_path / kind, config(kind, steps=20), probes=False)
    compare([tmp_path], recompute_gains=False)
    arms = read_json(tmp_path / "summary.json")["arms"]
    assert arms["plain"]["peak_forward_gain"] == 1 and arms["hc"]["peak_forward_gain"] is None
    stems = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert stems == {"loss", "validation", "loss_gap", "grad_norm", "seeds", "cost", "grad_heat"}


@pytest.mark.parametrize("kinds", [("plain",), ("hc", "mhc"), ("plain", "hc")])
def test_the_gap_needs_plain_and_another(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        write_run(tmp_path / kind, config(kind, steps=20, layers=2))
    arms = arms_in(tmp_path)
    assert (loss_gap(gallery_of(arms)) is not None) == (kinds == ("plain", "hc"))


def test_the_gap_is_taken_to_the_twin_at_shared_steps(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"plain{seed}", config("plain", seed=seed, steps=20))
        write_run(tmp_path / f"mhc{seed}", config("mhc", seed=seed, steps=20), until=15)
    write_run(tmp_path / "hc", config("hc", seed=1, steps=20, optimizer__lr=0.5))
    write_run(tmp_path / "hc7", config("hc", seed=7, steps=20))
    arms = {arm.name: arm for arm in arms_in(tmp_path)}
    everyone = list(arms.values())
    names = {name: [other.name for other in reference_arms(arm, everyone)] for name, arm in arms.items()}
    assert names["mhc0"] == ["plain0"] and names["mhc1"] == ["plain1"]
    assert names["hc"] == ["plain1"]  # no twin at this rate: the plain arm with its seeds
    assert names["hc7"] == ["plain0", "plain1"]  # neither: all of them
    steps, gap = gap_to_plain(arms["mhc1"], everyone, "loss")
    assert steps.tolist() == list(range(1, 16))
    np.testing.assert_array_equal(gap, arms["mhc1"].column("loss")[1] - arms["plain1"].column("loss")[1][:15])
    _, gap = gap_to_plain(arms["hc7"], everyone, "loss")
    mean = (arms["plain0"].column("loss")[1] + arms["plain1"].column("loss")[1]) / 2
    np.testing.assert_allclose(gap, arms["hc7"].column("loss")[1] - mean)
    steps, _ = gap_to_plain(arms["hc7"], [arms["hc7"]], "loss")
    assert not len(steps)


# -- what is said -------------------------------------------------------------------------------------------------


def test_one_seed_is_said_and_several_are_weighed(tmp_path: Path) -> None:
    arms = arms_in(demo(tmp_path / "one"))
    assert any("one seed" in text for text in said(arms))
    for seed in range(3):
        for kind in ("plain", "mhc"):
            write_run(tmp_path / "three" / f"{kind}{seed}", config(kind, seed=seed, steps=20))
    sentences = said(arms_in(tmp_path / "three"))
    assert not any("one seed" in text for text in sentences)
    assert any(text.startswith("mhc minus plain: -0.") and "over 3 paired seeds" in text for text in sentences)


def test_gains_and_baselines_in_words(tmp_path: Path) -> None:
    arms = arms_in(demo(tmp_path))
    sentences = "\n".join(said(arms, baselines=Baselines(4.6, 3.6, None, 10, 10)))
    assert "every arm lies under the bigram" in sentences
    assert "HC's peak is" in sentences and "mhc 1.000 forward" in sentences
    assert "not under the bigram: hc, mhc and plain" in "\n".join(
        said(arms, baselines=Baselines(4.6, 1.0, None, 10, 10))
    )


def test_other_data_or_length_is_warned_of(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", config("plain", steps=20))
    write_run(tmp_path / "hc", config("hc", steps=20, data__prefetch=7))
    assert not any("same data" in text for text in said(arms_in(tmp_path)))
    write_run(tmp_path / "mhc", config("mhc", steps=30, data__source="text:x", data__holdout=0.1))
    sentences = said(arms_in(tmp_path))
    assert any("data.source and data.holdout differ" in text for text in sentences)
    assert any("train.steps differ" in text for text in sentences)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "not finite"), (0.0, "0.000"), (1.13628, "1.136"), (1139.8, "1,140"), (2.5e-7, "2.5e-07")],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text or number(value, 2) == text


# -- recomputation ------------------------------------------------------------------------------------------------


def test_recomputed_gains_that_differ_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_checkpoints(monkeypatch, error=1e-3)
    arms = arms_in(demo(tmp_path))
    sentences = said(arms, recomputed={arm.name: recompute(arm) for arm in arms})
    assert any("DIFFER from the logged ones" in text for text in sentences)


def test_of_many_arms_one_a_topology_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    install_checkpoints(monkeypatch, error=1e-6)
    for kind in ("plain", "hc", "mhc"):
        for seed in range(3):
            write_run(tmp_path / f"{kind}{seed}", config(kind, seed=seed, steps=20, layers=2))
    page = compare([tmp_path]).read_text()
    summary = read_json(tmp_path / "summary.json")
    known = {name for name, arm in summary["arms"].items() if arm["recomputed_gain_difference"] is not None}
    assert known == {"plain0", "hc0", "mhc0"}
    assert any("of one arm of each topology agree with the logged ones" in text for text in summary["findings"])
    assert "One arm of each topology, the first seed at its best rate." in page


def test_reasons_for_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_checkpoints(monkeypatch, step=7)
    write_run(tmp_path / "hc", config("hc", steps=20))
    write_run(tmp_path / "mhc", config("mhc", steps=20), until=10)
    hc, mhc = map(recompute, arms_in(tmp_path))
    assert hc.difference is None and hc.reason == "no probe was logged at step 7" and set(hc.peaks) == {"hc"}
    assert mhc.difference is None and mhc.reason is not None and "no checkpoint" in mhc.reason and not mhc.peaks


def test_gain_difference() -> None:
    logged = {"step": 3, "gain/a": [1.0, 2.0], "gain/b": [math.inf, math.nan], "ds_error/rows": [1.0]}
    assert gain_difference({"gain/a": np.array([1.0, 2.0]), "gain/b": np.array([math.inf, math.nan])}, logged) == 0
    assert gain_difference({"gain/a": [1.0, 2.002], "gain/b": [math.inf, math.nan]}, logged) == pytest.approx(1e-3)
    assert gain_difference({"gain/a": [1.0, 2.0], "gain/b": [1.0, math.nan]}, logged) == math.inf
    assert gain_difference({"gain/a": [1.0, 2.0]}, logged) == math.inf
    assert gain_difference({"gain/a": [1.0], "gain/b": [math.inf, math.nan]}, logged) == math.inf
    assert gain_difference({}, {"step": 3}) is None


def test_events_and_what_was_done_in_words(tmp_path: Path, quick: None) -> None:
    events = [crossed(100, "forward_gain"), spike(120, cause="signal_explosion"), crossed(160, "attention_logit")]
    events += [spike(300, action="rewind"), rewound(300, 290)]
    write_run(tmp_path / "hc", config("hc", steps=400, layers=2, monitor__probe_every=20), events=events)
    write_run(tmp_path / "plain", config("plain", steps=400, layers=2))
    sentences = said(arms_in(tmp_path))
    (told,) = [text for text in sentences if "loss event" in text and "by cause" in text]
    assert "2 loss events" in told and "1 signal_explosion and 1 loss_spike" in told
    assert "forward_gain once and no monitor once" in told
    assert "What was done: 1 rewind." in sentences
    page = compare([tmp_path], recompute_gains=False).read_text()
    for words in ("forward_gain, 20 steps before", "rewind (undone)", "300 → 290, 5 batches left out", f"{120:016x}"):
        assert words in page
    rows = (tmp_path / "data" / "events.csv").read_text().splitlines()
    assert len(rows) == 3 and rows[1].startswith("hc,120,120,1,120,True,signal_explosion")
    assert read_json(tmp_path / "summary.json")["arms"]["hc"]["loss_events"] == 2
    assert read_json(tmp_path / "summary.json")["topologies"]["hc"]["parameters_of_plain"] > 1


def test_what_had_too_little_history_is_not_judged(tmp_path: Path, quick: None) -> None:
    """A short run's loss and gradient norm jump under a rule that needs more steps than the run has."""
    write_run(tmp_path / "short", config("plain", steps=40, layers=1, monitor__zscore_min_history=64))
    lines = read_jsonl(tmp_path / "short" / "metrics.jsonl")
    for line in lines:
        line |= {"z_loss": None, "z_grad_norm": None, "spike": False}
    lines[30] |= {"loss": 4.55, "grad_norm": 33.0}
    (tmp_path / "short" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def compared() -> tuple[str, dict[str, Any], str]:
        page = compare([tmp_path], recompute_gains=False).read_text()
        summary = read_json(tmp_path / "summary.json")
        return page, summary["arms"], " ".join(summary["findings"])

    page, arms, said = compared()
    assert {arms["short"][name] for name in ("spike_score_loss", "spike_score_grad_norm", "spikes")} == {None}
    assert arms["short"]["judged_steps"] == 0
    reason = "Not judged, for a z-score needs 64 steps before it: loss and gradient norm of short (40 steps)."
    for text in (page, said):
        assert reason in text and "was flagged" not in text and "0 in every arm" not in text
    assert "not judged in short, for want of steps before it" in said and "<td>not judged</td>" in page
    # Beside one that was judged, and one that was from its 17th step on.
    for name, steps, first in (("long", 300, 65), ("middle", 150, 17)):
        write_run(tmp_path / name, config("plain", steps=steps, layers=1, monitor__zscore_min_history=first - 1))
        lines = read_jsonl(tmp_path / name / "metrics.jsonl")
        for line in lines:
            line |= dict.fromkeys(("z_loss", "z_grad_norm"), None if line["step"] < first else 0.5)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, arms, said = compared()
    assert (arms["long"]["judged_steps"], arms["middle"]["judged_steps"]) == (236, 134)
    assert isinstance(arms["long"]["spike_score_loss"], float) and arms["long"]["spikes"] is not None
    for text in (page, said):
        assert reason in text
        assert "Loss and gradient norm of the other arms are judged from step 17 (middle) and 65 (long) on." in text


def test_a_run_without_events_says_so(tmp_path: Path, quick: None) -> None:
    write_run(tmp_path / "plain", config("plain", steps=20, layers=1))
    assert "no monitor crossed its threshold" in compare([tmp_path], recompute_gains=False).read_text()


@pytest.mark.long
def test_twenty_arms_fit_a_small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, seeds and events have every figure with its data, on a page that a browser opens at once."""
    monkeypatch.setattr(compare_module, "baselines", lambda data: Baselines(4.6, 3.6, None, 1000, 100))
    page = compare([grid(tmp_path)], recompute_gains=False)
    assert page.stat().st_size < 2_500_000
    for words in ("points: validation", "the legend names the step"):  # of few arms
        assert words not in page.read_text()
    stems = {file.stem for file in (tmp_path / "figures").glob("*.png")}
    assert stems == FIGURES | {"lr_sensitivity"}
    for stem in stems:
        head, *rows = (tmp_path / "data" / f"{stem}.csv").read_text("utf-8").splitlines()
        assert head.startswith("panel,series,what,") and rows
    assert len((tmp_path / "data" / "rates.csv").read_text().splitlines()) == 21
    assert read_json(tmp_path / "summary.json")["topologies"]["hc"]["best_lr"] == 0.01


def test_many_arms_are_drawn_by_topology(tmp_path: Path) -> None:
    for kind in ("plain", "hc"):
        for seed in range(3):
            for lr in (0.01, 0.1):
                write_run(
                    tmp_path / f"{kind}{lr}_{seed}",
                    config(kind, seed=seed, steps=20, layers=2, optimizer__lr=lr),
                    offset=lr,
                )
    arms = arms_in(tmp_path)
    everyone = topologies(arms)
    gallery = gallery_of(arms)
    assert [(series.label, len(series.arms)) for series in gallery.series] == [("plain", 3), ("hc", 3)]
    assert {arm.flat["optimizer.lr"] for arm in gallery.shown} == {0.01}
    (gains,) = [series.mean(lambda arm: arm.column("loss")) for series in gallery.series if series.label == "hc"]
    expected = np.mean([arm.column("loss")[1] for arm in everyone[1].arms], axis=0)
    np.testing.assert_allclose(gains[1], expected)


# -- figures ------------------------------------------------------------------------------------------------------


def test_a_large_gradient_norm_stands_in_view_and_does_not_lift_its_neighbours(tmp_path: Path) -> None:
    for seed in range(10):
        events = [spike(100, flagged=["grad_norm"], grad_norm=1e4)] if seed == 3 else []
        write_run(tmp_path / f"hc{seed}", config("hc", seed=seed, steps=200, layers=1), events=events)
    arms = arms_in(tmp_path)
    large = next(index for index, arm in enumerate(arms) if arm.name == "hc3")
    rows = [{**row, "grad_norm": 1e4 if row["step"] == 100 else row["grad_norm"]} for row in arms[large].metrics]
    arms[large] = dataclasses.replace(arms[large], metrics=rows)
    sheet = grad_norm(gallery_of(arms))
    assert sheet.panels[0].get_ylim()[1] > 1e4
    norms = arms[large].column("grad_norm")[1]
    drawn = [y for _, series, what, _, y in sheet.table if (series, what) == ("hc3", "smoothed")]
    assert max(drawn[94:105]) < 10 * np.median(norms) < np.mean(norms[94:105])


def test_a_kind_keeps_its_colour_and_its_arms_stay_apart(tmp_path: Path) -> None:
    for index in range(12):
        write_run(tmp_path / f"mhc{index}", config("mhc", seed=index, steps=4, layers=1))
    for kind in ("plain", "hc"):
        write_run(tmp_path / kind, config(kind, steps=4, layers=1))
    arms = arms_in(tmp_path)
    novel = arms[0].config | {"residual": {"kind": "novel"}}
    look = styles(topologies([*arms, dataclasses.replace(arms[0], name="novel", config=novel)]))
    assert len(set(look.values())) == 15
    alone = styles(topologies([arm for arm in arms if arm.name == "mhc0"]))
    assert alone["mhc0"] == look["mhc0"] and isinstance(alone["mhc0"], Style)
    assert len({look[name].colour for name in ("plain", "hc", "mhc0", "novel")}) == 4


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300), st.floats(0.005, 0.2))
@settings(deadline=None)
def test_smoothing_is_a_mean_of_neighbours(values: list[float], share: float) -> None:
    smoothed = smooth(np.array(values), share)
    reach = round(share * len(values))
    for i in range(len(values)):
        back = min(i, reach)
        window = values[i - back : i + min(back, len(values) - 1 - i) + 1]
        assert smoothed[i] == pytest.approx(np.mean(window), abs=1e-8)


def test_smoothing_does_not_bend_a_steep_start_and_passes_over_nan() -> None:
    line = np.linspace(5, 2, 200)
    np.testing.assert_allclose(smooth(line)[:150], line[:150])
    line[50] = math.nan
    assert np.isfinite(smooth(line)).all()
    assert np.isnan(smooth(np.full(100, math.nan))).all() and not len(smooth(np.zeros(0)))


def test_thinning_keeps_every_spike() -> None:
    y = np.random.default_rng(0).normal(size=100_003)
    y[70_001], y[100_002], y[5] = 50.0, 60.0, math.nan
    x = np.arange(len(y), dtype=np.float64)
    thin_x, thin_y = envelope(x, y)
    assert len(thin_x) < 3200 and np.all(np.diff(thin_x) >= 0)
    assert {50.0, 60.0} <= set(thin_y.tolist())
    np.testing.assert_array_equal(y[thin_x.astype(int)], thin_y)


# -- mistakes -----------------------------------------------------------------------------------------------------


def broken(name: str, content: str) -> Callable[[Path], list[str]]:
    def make(root: Path) -> list[str]:
        folder = write_run(root / "hc", config("hc", steps=8, layers=1))
        (folder / name).write_text(content)
        return [str(root)]

    return make


def exit_code(arguments: list[str]) -> int:
    """Return the exit code of the program, as from a command line."""
    with pytest.raises(SystemExit) as left:
        cli.run_main(main, arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


def run_itself(root: Path) -> list[str]:
    folder = write_run(root / "hc", config("hc", steps=8, layers=1))
    return [str(folder), "--out", str(folder)]


def foreign_summary(root: Path) -> list[str]:
    write_run(root / "hc", config("hc", steps=8, layers=1))
    write_json(root / "summary.json", {"mine": 1})
    return [str(root)]


def old_data(root: Path) -> list[str]:
    folder = write_run(root / "hc", config("hc", steps=8, layers=1))
    stored = read_json(folder / "config.json")
    write_json(folder / "config.json", stored | {"data": stored["data"] | {"colour": "red"}})
    return [str(root)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: [], "RUN_OR_FOLDER"),
        (lambda root: [str(root / "nowhere")], "no such folder"),
        (lambda root: [str(root)], "no run here"),
        (lambda root: [str(root), "--wrong"], "--wrong"),
        (broken("config.json", "{"), "config.json: holds no JSON object"),
        (broken("config.json", "{}"), "residual.kind is missing"),
        (broken("metrics.jsonl", "x\n{}\n"), "metrics.jsonl: line 1"),
        (broken("metrics.jsonl", '{"loss":1}\n'), "line 1 has no step"),
        (broken("metrics.jsonl", ""), "no run here has logged a step"),
        (broken("summary.json", "[]"), "summary.json: holds no JSON object"),
        (run_itself, "is a run"),
        (foreign_summary, "not a comparison's"),
        (old_data, "not of this version"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    quick: None,
    make: Callable[[Path], list[str]],
    message: str,
) -> None:
    assert exit_code([*make(tmp_path), "--no_recompute"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    write_run(tmp_path / "hc", config("hc", steps=8, layers=1))
    (tmp_path / "file").write_text("")
    assert exit_code([str(tmp_path), "--no_recompute", "--out", str(tmp_path / "file" / "below")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and "give --out" not in said


def test_a_full_disk_is_no_reason_to_give_another_out(tmp_path: Path, quick: None) -> None:
    write_run(tmp_path / "hc", config("hc", steps=8, layers=1))
    with small_disk(50), pytest.raises(DiskFull, match=r"cannot be written: File too large; .* free in") as raised:
        main([str(tmp_path), "--no_recompute", "--out", str(tmp_path / "report")])
    assert "--out" not in str(raised.value)


def test_the_config_of_the_data_reaches_the_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DataConfig] = []
    monkeypatch.setattr(compare_module, "draw", lambda *_: [])

    def remember(data: DataConfig) -> Baselines:
        seen.append(data)
        return NO_BASELINES

    monkeypatch.setattr(compare_module, "baselines", remember)
    write_run(tmp_path / "hc", config("hc", steps=8, layers=1, data__source="text:a"))
    page = compare([tmp_path], recompute_gains=False).read_text()
    assert seen == [dataclasses.replace(config("hc").data, source="text:a")]
    assert "none asked for" in page
