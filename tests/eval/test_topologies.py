"""Test best rates, learning-rate sensitivity, and what paired seeds may say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mhc.eval.compare.runs import Arm, load
from mhc.eval.compare.topologies import paired, reference_of, topologies
from mhc.monitor.detectors import lr_sensitivity
from tests.eval.synthetic_runs import config, write_run


def arms_in(root: Path) -> list[Arm]:
    return load([root])[1]


def test_each_topology_stands_at_its_own_best_rate(tmp_path: Path) -> None:
    """Means over seeds decide; a rate with a halted seed is never best; pairs are taken across rates."""
    losses = {("plain", 0.01): 0.0, ("plain", 0.1): -0.3, ("hc", 0.01): -0.2, ("hc", 0.1): -0.9, ("hc", 0.03): 0.1}
    for (kind, lr), offset in losses.items():
        for seed in (0, 1, 2):
            halted = kind == "hc" and lr == 0.1 and seed == 1
            write_run(
                tmp_path / f"{kind}{lr}_{seed}",
                config(kind, seed=seed, steps=20, layers=1, optimizer__lr=lr, checkpoint__every=seed + 1),
                offset=offset,
                exit_reason="halted" if halted else "finished",
            )
    plain, hc = topologies(arms_in(tmp_path))
    assert (plain.label, plain.best.lr, plain.at_edge) == ("plain", 0.1, True)
    assert (hc.label, hc.best.lr, [rate.lr for rate in hc.rates]) == ("hc", 0.01, [0.01, 0.03, 0.1])
    assert math.isinf(hc.rates[2].mean) and len(hc.arms) == 3
    (pair,) = paired([plain, hc])
    bits = {arm.name: arm.column("val_bits_per_byte")[1][-1] for arm in arms_in(tmp_path)}
    expected = [bits[f"hc0.01_{seed}"] - bits[f"plain0.1_{seed}"] for seed in (0, 1, 2)]
    assert list(pair.differences.values()) == pytest.approx(expected)
    assert pair.mean == pytest.approx(np.mean(expected))
    assert pair.interval is not None
    half = 4.3027 * np.std(expected, ddof=1) / math.sqrt(3)
    assert pair.interval == pytest.approx((pair.mean - half, pair.mean + half), rel=1e-3)
    finals = [np.mean([arm.column("val_loss")[1][-1] for arm in rate.arms]) for rate in hc.rates[:2]]
    start = np.mean([arm.column("loss")[1][0] for arm in hc.every_arm])
    assert hc.sensitivity == pytest.approx(lr_sensitivity([*finals, math.nan], float(start)))
    assert plain.sensitivity is not None


@pytest.mark.parametrize(("offset", "separated"), [(-3.0, True), (0.0, False)])
def test_seeds_separate_only_what_is_far_apart(tmp_path: Path, offset: float, separated: bool) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / f"plain{seed}", config("plain", seed=seed, steps=20, layers=1), offset=0.1 * seed)
        shift = offset + 0.11 + (0.02, -0.02, 0.01)[seed]  # hc's runs lie 0.11 lower by themselves
        write_run(tmp_path / f"hc{seed}", config("hc", seed=seed, steps=20, layers=1), offset=0.1 * seed + shift)
    (pair,) = paired(topologies(arms_in(tmp_path)))
    assert pair.separated is separated and ("do not separate" in pair.verdict) is not separated
    assert ("includes 0" in pair.verdict) is not separated


def test_one_seed_separates_nothing(tmp_path: Path) -> None:
    for kind in ("plain", "hc"):
        write_run(tmp_path / kind, config(kind, steps=20, layers=1))
    (pair,) = paired(topologies(arms_in(tmp_path)))
    assert pair.interval is None and not pair.separated and "one seed" in pair.verdict


def test_controls_are_measured_against_the_plain_residual_of_their_own_model(tmp_path: Path) -> None:
    for layers in (1, 2):
        for kind in ("plain", "hc"):
            write_run(tmp_path / f"{kind}{layers}", config(kind, steps=4, layers=layers))
    write_run(tmp_path / "none", config("plain", steps=4, layers=1, residual__scale=0.0))
    everyone = topologies(arms_in(tmp_path))
    by_arm = {topology.arms[0].name: topology for topology in everyone}
    found = {name: reference_of(topology, everyone) for name, topology in by_arm.items()}
    names = {name: reference.arms[0].name if reference else None for name, reference in found.items()}
    assert names == {"plain1": None, "plain2": None, "none": "plain1", "hc1": "plain1", "hc2": "plain2"}
    assert by_arm["none"].label == "plain (layers 1, scale 0)"


def test_a_rate_without_a_result_is_not_the_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config("hc", steps=20, layers=1, optimizer__lr=0.01), until=2)
    write_run(tmp_path / "b", config("hc", steps=20, layers=1, optimizer__lr=0.1))
    (hc,) = topologies(arms_in(tmp_path))
    assert hc.best.lr == 0.1 and math.isnan(hc.rates[0].mean) and hc.rates[0].scores == {}
