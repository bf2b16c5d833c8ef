"""Declare the fields of the scales in a block: those of its norms, and that of the feed-forward's output."""

from __future__ import annotations

import dataclasses

from mhc.config.group import Group, setting

SHAPES = ("linear", "cosine")  # of the way of a scheduled scale from its first value to its last


@dataclasses.dataclass(frozen=True)
class NormConfig(Group, group="norm"):
    """Sets the norms of the sublayers (always inside F: the streams are never normalised) and before the head."""

    kind: str = setting("rmsnorm", "layernorm also centres and has a bias", choices=("rmsnorm", "layernorm"))
    placement: str = setting(
        "pre", "pre: F(norm u); post: norm F(u); sandwich: norm F(norm u)", choices=("pre", "post", "sandwich")
    )
    final: bool = setting(True, "a norm before the head")
    embedding: bool = setting(False, "a norm after the embedding")
    eps: float = setting(1e-6, "added to the mean square under the root", low=0)
    bias: bool = setting(False, "rmsnorm: a bias after the scale, in every norm over the model's width")
    gamma_init: float = setting(1.0, "initial scale of the sublayers' norms")
    gamma_frozen: bool = setting(False, "leave the sublayers' scales untrained")
    gamma_schedule: float | None = setting(
        None, "untrained scale of the sublayers' norms at train.steps, reached from gamma_init; None: trained"
    )
    gamma_shape: str = setting("linear", "way from gamma_init to gamma_schedule over train.steps", choices=SHAPES)
    gamma_layers: tuple[int, ...] = setting(
        (), "layers, from 0, that the other gamma fields are for; the rest start at 1 and are trained; (): all", low=0
    )
    beta_frozen: bool = setting(False, "leave the biases of the sublayers' norms untrained, at 0")


@dataclasses.dataclass(frozen=True)
class UpdateConfig(Group, group="update"):
    """Sets a factor of the feed-forward sublayer's output F, dense or of experts; one for each layer."""

    scale: float = setting(1.0, "the factor; with trained or schedule its first value")
    trained: bool = setting(False, "train the factor of each layer")
    schedule: float | None = setting(None, "untrained factor at train.steps, reached from scale; None: no schedule")
    shape: str = setting("linear", "way from scale to schedule over train.steps", choices=SHAPES)
    layers: tuple[int, ...] = setting(
        (), "layers, from 0, that have the factor; that of the rest stays 1; (): all", low=0
    )

    @property
    def on(self) -> bool:
        """Return whether the model has the factors at all, as parameters; off, it is as if there were no such field."""
        return self.scale != 1.0 or self.trained or self.schedule is not None
