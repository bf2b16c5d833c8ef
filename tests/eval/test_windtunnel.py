"""Test a model's belief against the exact posterior: a perfect one has distance 0, a merely similar one is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mhc.config import from_config_dict
from mhc.data.windtunnel import Bijection, HiddenMarkov, fields
from mhc.errors import UserError
from mhc.eval.windtunnel.__main__ import main
from mhc.eval.windtunnel.belief import Belief, longer
from mhc.eval.windtunnel.measures import distances, optimum, without_context
from mhc.eval.windtunnel.page import Measured, topologies
from mhc.eval.windtunnel.sections import SECTIONS, Result, chosen
from tests.small_runs import on_demand, run

SEQUENCES = {
    "bijection": Bijection(8).make(0, "validation", range(200)),
    "hmm": HiddenMarkov(observations=10).make(0, "validation", range(200)),
}
MEASURES = ("depth", "geometry")
tasks = pytest.mark.parametrize("name", list(SEQUENCES))


def logs(probabilities: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


@tasks
def test_the_posterior_itself_has_no_distance(name: str) -> None:
    posterior = SEQUENCES[name].posterior
    padded = np.concatenate([np.zeros_like(posterior), posterior], axis=-1)  # classes behind other outputs
    found = distances(logs(padded), posterior, posterior.shape[-1])
    for values in (found.entropy_error, found.kl, found.total_variation):
        assert np.abs(values).max() < 1e-12
    assert found.cross_entropy.mean() == pytest.approx(optimum(posterior), abs=1e-12)


def test_without_context_nothing_is_known() -> None:
    """At 8 symbols the control must reach 3 − log2(8!) / 7 bits, and no less."""
    drawn = Bijection(8).make(0, "validation", range(20_000))
    error = without_context(drawn.posterior).entropy_error.mean()
    assert error == pytest.approx(3 - np.log2(40320) / 7, abs=1e-3)
    uniform = distances(np.full_like(drawn.posterior, -np.log(8)), drawn.posterior, 0)
    assert uniform.entropy_error.mean() == pytest.approx(0.8144, abs=5e-5)


@tasks
def test_an_entropy_that_is_right_on_the_wrong_support_is_seen(name: str) -> None:
    posterior = SEQUENCES[name].posterior
    rolled = 0.999 * np.roll(posterior, 1, axis=-1) + 0.001 / posterior.shape[-1]
    found = distances(np.log(rolled), posterior, 0)
    assert found.entropy_error.mean() < 0.02
    assert found.kl.mean() > 0.3 and found.total_variation.mean() > 0.2


@tasks
def test_entropies_that_are_right_on_average_alone_are_seen(name: str) -> None:
    """With the posteriors of other sequences every mean over sequences is right, and no sequence is."""
    posterior = SEQUENCES[name].posterior
    shuffled = 0.999 * np.roll(posterior, 1, axis=0) + 0.001 / posterior.shape[-1]
    found = distances(np.log(shuffled), posterior, 0)
    assert found.kl.mean() > 0.3
    if name == "hmm":
        assert found.entropy_error.mean() > 0.2


def test_what_a_model_puts_on_ids_that_are_no_class_counts() -> None:
    posterior = SEQUENCES["bijection"].posterior
    half = np.concatenate([0.5 * posterior, np.full((*posterior.shape[:2], 1), 0.5)], axis=-1)
    found = distances(logs(half), posterior, 0)
    np.testing.assert_allclose(found.kl, 1.0, atol=1e-12)  # a factor of two is a bit
    np.testing.assert_allclose(found.total_variation, 0.5, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        distances(np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), 1)


def test_other_observations_are_another_source() -> None:
    assert longer("windtunnel:hmm,observations=10,states=4", 25) == "windtunnel:hmm,states=4,observations=25"
    with pytest.raises(UserError, match="--observations: windtunnel:bijection has none"):
        longer("windtunnel:bijection", 25)
    with pytest.raises(UserError, match="an integer from 1"):
        longer("windtunnel:hmm", 0)


# ------------------------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from (task, control) to the folder of a run of a few steps."""
    root = tmp_path_factory.mktemp("windtunnel")

    @on_demand
    def make(source: str, attention: str = "heads") -> Path:
        folder = root / f"{source.replace(':', '_')}_{attention}"
        groups: dict[str, dict[str, object]] = {
            "model": {"layers": 1, "width": 16},
            "attention": {"heads": 2, "kind": attention},
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "constant"},
            "train": {"steps": 30, "batch_size": 16},
            "validation": {"rows": 16, "every": 30},
            "monitor": {"tensorboard": False, "progress_every": 0, "probe_every": 15, "probe_sequences": 2},
        }
        for field, value in fields(source).items():
            group, _, name = field.partition(".")
            groups.setdefault(group, {})[name] = value
        assert run(from_config_dict(groups), folder) == 0
        return folder

    return make


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("windtunnel:bijection,symbols=4", marks=pytest.mark.long),
        pytest.param("windtunnel:hmm,observations=2,states=2,symbols=2", marks=pytest.mark.long),
    ],
)
def test_the_program_measures_runs_and_compares_topologies(
    source: str, trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, control = trained(source), trained(source, "tokenwise")
    given = ["--checkpoint", str(model), str(control), "--sequences", "64", "--out", str(tmp_path / "out")]
    assert main([*given, "--measures", *MEASURES]) == 0
    table = capsys.readouterr().out
    assert "entropy error" in table and "mhc, control" in table
    found = json.loads((tmp_path / "out/windtunnel.json").read_text())
    one, other = found["checkpoints"]
    assert (one["control"], other["control"]) == (False, True)
    summary = json.loads((model / "summary.json").read_text())
    assert one["cross_entropy_nats"] >= one["optimum_nats"]
    assert one["cross_entropy_nats"] == pytest.approx(summary["val_loss"], rel=0.2)  # other sequences, the same task
    assert other["kl_bits"]["value"] > other["kl_bits_without_context"] - 0.05  # no leak
    assert found["topologies"].keys() == {"mhc", "mhc, control without context"}
    page = (tmp_path / "out/windtunnel.html").read_text()
    assert "Belief against the exact posterior" in page and page.count("data:image/png") >= 4
    for name in MEASURES:
        assert one[name] and other[name] and found["topologies"]["mhc"][name]
        heading = next(section.words for section in SECTIONS if section.name == name)
        assert f"<h2>{heading}</h2>" in page
    assert "has no keys" in page
    assert other["geometry"]["keys"] is None and one["geometry"]["keys"]
    # The place tells the entropy of the bijection: no R² of it, and no figure.
    assert ("entropy_r2" in found["topologies"]["mhc"]["depth"]) == ("hmm" in source)
    assert (tmp_path / "out/depth_entropy.png").exists() == ("hmm" in source)
    assert (tmp_path / "out/depth_log_posterior.csv").exists() and (tmp_path / "out/alignment.csv").exists()


def test_more_observations_than_trained(trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = trained("windtunnel:hmm,observations=2,states=2,symbols=2")
    assert main(["--checkpoint", str(model), "--sequences", "8", "--observations", "5"]) == 0
    capsys.readouterr()


def test_a_run_on_text_is_refused(corpus: str, tmp_path: Path) -> None:
    from tests.small_runs import config

    assert run(config(corpus, "plain", train={"steps": 1}), tmp_path / "text") == 0
    with pytest.raises(UserError, match="is no wind tunnel"):
        main(["--checkpoint", str(tmp_path / "text")])
    with pytest.raises(UserError, match="--sequences: given 1"):
        main(["--checkpoint", str(tmp_path / "text"), "--sequences", "1"])


def test_a_measure_that_is_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="--measures: given probes, allowed: belief"):
        main(["--checkpoint", "nowhere", "--measures", "probes"])
    assert chosen(["all"]) == list(SECTIONS) and chosen(["belief"]) == []


def test_scalars_of_a_measure_are_compared_by_seed() -> None:
    """mhc is 0.2 above plain at equal seeds, though seeds differ by more; a value that is absent makes no pair."""

    def run_of(kind: str, seed: int, scalars: dict[str, float]) -> Measured:
        posterior = SEQUENCES["hmm"].posterior
        none = without_context(posterior)
        belief = Belief(f"{kind}{seed}", kind, False, (seed, seed), "windtunnel:hmm", none, none, optimum(posterior))
        return Measured(belief, {"depth": Result(scalars, {})})

    runs = [run_of("plain", seed, {"r2": 0.1 * seed}) for seed in range(4)]
    runs += [run_of("mhc", seed, {"r2": 0.1 * seed + 0.2}) for seed in range(4)]
    runs += [run_of("hc", 0, {}), run_of("hc", 9, {"r2": 0.5})]
    compared = topologies(runs)
    assert compared["plain"]["depth"]["r2"]["value"] == pytest.approx(0.15)
    assert compared["plain"]["depth"]["r2_beyond_plain"] is None
    beyond = compared["mhc"]["depth"]["r2_beyond_plain"]
    assert [beyond[name] for name in ("value", "low", "high")] == pytest.approx([0.2, 0.2, 0.2])
    assert compared["hc"]["depth"]["r2"] == {"value": 0.5, "low": None, "high": None}
    assert compared["hc"]["depth"]["r2_beyond_plain"] is None
    assert compared["mhc"]["kl_bits_beyond_plain"]["value"] == 0
