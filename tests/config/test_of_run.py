"""Test the config of a run, to continue from it or to change it: configs/of_run.py:RUN, and RUN/config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mhc import cli, kinds
from mhc.config import Config, change, resolve, to_json
from mhc.errors import UserError
from tests.small import small

FILE = Path(__file__).parents[2] / "configs" / "of_run.py"


def again(config: Config, folder: Path, *overrides: str) -> Config:
    """Return the resolved config of a run in ``folder``, as the command line gives it."""
    (folder / "config.json").write_text(to_json(config))
    loaded = resolve(cli.load_config(f"{FILE}:{folder}", overrides), config.vocab_size)
    assert resolve(cli.load_config(f"{folder}/config.json", overrides), config.vocab_size) == loaded
    return loaded


@pytest.mark.parametrize(
    "config",
    [
        small("plain"),
        small("hc", optimizer={"clip_norm": None}, validation={"every": 0}),
        small("mhc", residual={"init": "equivalent", "alpha": 0.0}, attention={"kv_heads": 1, "window": 3}),
        small("mhc", attention={"kind": "mla", "kv_rank": 4}, moe={"experts": 4, "width": 6}),
        small("plain", positions={"kind": "learned", "max_length": 40}, schedule={"decay_steps": 5}),
    ],
    ids=lambda config: config.residual.kind,
)
def test_it_is_the_run_s_config(config: Config, tmp_path: Path) -> None:
    assert again(config, tmp_path) == config


def test_what_was_derived_follows(tmp_path: Path) -> None:
    loaded = again(small("plain"), tmp_path, "--config.residual.kind=mhc", "--config.model.width=32")
    assert (loaded.residual.n, loaded.residual.init, loaded.head_dim) == (4, "home", 16)
    assert loaded.mlp_width == 24  # was given
    steps = again(small("plain"), tmp_path, "--config.train.steps=50")
    assert steps.schedule.decay_steps == 50


@pytest.mark.parametrize("kind", kinds.known())
@pytest.mark.parametrize("other", kinds.known())
def test_another_kind_is_as_if_it_had_been_chosen(kind: str, other: str) -> None:
    """Nothing of the old kind stays behind in a resolved config, neither derived values nor options."""
    groups: dict[str, Any] = {"optimizer": {"lr": 0.5}, "schedule": {"kind": "wsd", "wsd_steps": 3}}
    changed = change(small(kind, **groups), {"residual.kind": other})
    assert resolve(changed, small(kind).vocab_size) == small(other, **groups)


@pytest.mark.parametrize("run", ["", "nowhere"])
def test_no_run_is_one_line(run: str) -> None:
    with pytest.raises(UserError, match=r"of_run\.py:.*no run folder, allowed: configs/of_run\.py:RUN"):
        cli.load_config(f"{FILE}:{run}", [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"config file .*config\.json: no such file$"),
        ("{", r"config file .*config\.json: config: not JSON: line 1"),
        ("[]", r"config file .*config\.json: config: given list"),
        ('{"model": {"layres": 2}}', r"config file .*config\.json: model\.layres: .*did you mean model\.layers"),
        ("\udcff", r"config file .*config\.json: .*utf-8"),
    ],
)
def test_a_stored_config_that_cannot_be_read_is_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=words):
        cli.load_config(str(file), ())
