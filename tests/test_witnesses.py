"""Test that runs of an earlier commit (tests/witnesses) are read, resumed and compared as they were then."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mhc import cli, provenance
from mhc import config as configs
from tests import witnessed
from tests.small_runs import resolved
from tests.witnessed import FOLDER, RUNS, apart

ROOT = Path(__file__).parents[1]
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text("utf-8"))
NEAR = 1e-5  # relative: what another machine or compiler may round otherwise
EXACT = 1e-12  # of what is read from logs


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the witnesses, since reading a run may leave a file there."""
    return Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("copies") / "witnesses"))


@pytest.fixture(autouse=True)
def _inside(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the folder of the witnesses, since the runs name their corpus relative to it."""
    monkeypatch.chdir(copies)


def of(kind: str) -> dict[str, Any]:
    """Return what is recorded of a run."""
    values: dict[str, Any] = EXPECTED["runs"][kind]
    return values


@pytest.mark.parametrize("kind", RUNS)
def test_every_field_of_the_config_has_its_value(kind: str) -> None:
    stored = configs.from_json(Path(kind, "config.json").read_text("utf-8"))
    values = witnessed.flat(stored)
    assert {name: values.get(name, "no such field") for name in of(kind)["config"]} == of(kind)["config"]
    assert provenance.read(Path(kind)).config == stored


@pytest.mark.parametrize("kind", RUNS)
def test_the_command_still_describes_the_run_and_so_resumes_it(kind: str) -> None:
    config = cli.load_config(str(ROOT / "configs" / "default.py"), witnessed.overrides(kind))
    stored = configs.from_json(Path(kind, "config.json").read_text("utf-8"))
    assert configs.check_resume(stored, resolved(configs.keep_validation_rule(stored, config))) == {}


@pytest.mark.parametrize("kind", RUNS)
def test_every_parameter_is_read_bit_for_bit(kind: str) -> None:
    assert witnessed.weights(Path(kind)) == of(kind)["weights"]


@pytest.mark.parametrize("kind", RUNS)
def test_the_loss_of_a_fixed_batch_is_what_it_was(kind: str) -> None:
    assert witnessed.loss(Path(kind)) == pytest.approx(of(kind)["loss"], rel=NEAR)


@pytest.mark.parametrize("kind", RUNS)
def test_a_copy_goes_on_as_it_did(kind: str) -> None:
    """Optimiser state and data position are those of the run, or its next losses would differ."""
    assert witnessed.continued(Path(kind)) == pytest.approx(of(kind)["continued"], rel=NEAR)


@pytest.mark.parametrize("kind", RUNS)
def test_perplexity_is_what_it_was(kind: str) -> None:
    assert apart(kept(witnessed.scored(Path(kind)), of(kind)["perplexity"]), of(kind)["perplexity"], NEAR) == []


def test_a_comparison_says_what_it_said(tmp_path: Path) -> None:
    for kind in RUNS:
        shutil.copytree(kind, tmp_path / "compared" / kind)
    values = kept(witnessed.compared(tmp_path / "compared"), EXPECTED["compare"])
    assert apart(logged(values), logged(EXPECTED["compare"]), EXACT) == []
    for kind in RUNS:
        arm, expected = values["arms"][kind], EXPECTED["compare"]["arms"][kind]
        assert apart(arm["recomputed_gains"], expected["recomputed_gains"], NEAR) == []
        assert arm["recomputed_gain_difference"] <= NEAR


def kept(values: Any, expected: Any) -> Any:
    """Return the values, without those that the code has learnt to compute since."""
    if isinstance(values, dict) and isinstance(expected, dict):
        return {name: kept(value, expected[name]) for name, value in values.items() if name in expected}
    return values


def logged(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison's summary without what is computed anew from the weights."""
    arms = {
        name: {key: value for key, value in arm.items() if not key.startswith("recomputed")}
        for name, arm in summary["arms"].items()
    }
    findings = [re.sub(r"difference \S+ \(\w+\)", "difference …", line) for line in summary["findings"]]
    return {**summary, "arms": arms, "findings": findings}


def test_a_difference_is_seen() -> None:
    tree = {"a": {"b": [1.0, None]}, "c": "x", "n": 3}
    assert apart(tree, tree, 0.0) == [] == apart({"a": 1.0}, {"a": 1.0 + 1e-13}, EXACT)
    assert apart(tree, {**tree, "a": {"b": [1.0 + 1e-11, None]}}, EXACT) == ["a.b.0: 1.0 and 1.00000000001"]
    for other in ({**tree, "n": 4}, {**tree, "n": 3.0}, {**tree, "c": None}, {"a": tree["a"], "c": "x"}):
        assert len(apart(tree, other, 1e-3)) == 1
    assert len(apart({"a": [1.0]}, {"a": [1.0, 2.0]}, 1.0)) == 1


def test_nothing_names_the_machine_that_made_them() -> None:
    for file in sorted(FOLDER.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            match = re.search(rb"(?<![\w.*)\]])/(home|root|tmp|var|mnt|opt|work|usr|Users)/[\w.-]+", file.read_bytes())
            assert match is None, f"{file}: {match}"
