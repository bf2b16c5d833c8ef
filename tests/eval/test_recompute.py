"""Test gains under another convention of the projection: the same matrices, in whichever order the logits are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from mhc.config import Config
from mhc.eval.compare.probe_again import under_convention
from mhc.model.decoder import DecoderDefinition
from mhc.train.checkpoint import LoadedRun
from tests.small import packed, random_params, relative_error, small

PRESETS = ("paper", "deepseek")


def maps_of(config: Config, params: Any) -> np.ndarray:
    """Return H_res [S, B, T, N, N] of every sublayer and token."""

    def observe(view: Any) -> dict[str, jax.Array]:
        return {"res": view.connection.maps(view.context).res}

    batch = packed(2, padding=True)
    hidden = jax.jit(
        lambda params: (
            DecoderDefinition(config)
            .bind(params)
            .hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe)[1]
        )
    )
    return np.asarray(hidden(params)["res"])


@pytest.mark.parametrize(("ours", "theirs"), [PRESETS, PRESETS[::-1]])
def test_another_convention_projects_the_same_matrices(ours: str, theirs: str) -> None:
    """If Sinkhorn has converged, the presets differ by the transposition of the logits alone."""
    config = small("mhc", residual={"sinkhorn": ours})
    run = LoadedRun(config, 1, random_params(config, std=0.2))
    expected = maps_of(config, run.params)
    other = under_convention(run, theirs)
    assert other.config.residual.sinkhorn == theirs and run.config.residual.sinkhorn == ours
    # maps of later sublayers see streams that differ by the error of the earlier ones
    assert relative_error(maps_of(other.config, other.params), expected) <= 1e-4
    assert relative_error(maps_of(other.config, run.params), expected) > 0.05
    again = under_convention(other, ours)
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)


def test_the_same_convention_changes_nothing() -> None:
    config = small("mhc")
    run = LoadedRun(config, 1, random_params(config))
    assert under_convention(run, config.residual.sinkhorn) == run


def test_a_kind_without_conventions_is_refused() -> None:
    config = small("hc")
    with pytest.raises(ValueError, match="residual kind 'hc' has no conventions"):
        under_convention(LoadedRun(config, 1, random_params(config)), "paper")
