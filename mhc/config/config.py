"""Validate the configuration of a run, and resolve it: every None that derives from other fields is filled in."""

from __future__ import annotations

import dataclasses

from mhc import kinds
from mhc.config.checks import check
from mhc.config.derived import Groups
from mhc.errors import UserError
from mhc.rules import refuse


@dataclasses.dataclass(frozen=True)
class Config(Groups):
    """Describes a whole run. Raises UserError where fields do not go together."""

    def __post_init__(self) -> None:
        check(self)


def resolve(config: Config, vocab_size: int) -> Config:
    """Return the Config with every None filled in that derives from other fields.

    Args:
      config: a valid configuration.
      vocab_size: the number of the tokeniser's tokens.

    Raises:
      UserError: model.vocab_size is too small for the tokeniser.
    """
    model, residual = config.model, config.residual
    kind = residual.spec
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        refuse("model.vocab_size", model.vocab_size, f"at least {vocab_size}, the tokeniser's size")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size),
        attention=dataclasses.replace(
            config.attention,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            rope_dim=config.rope_dim,
        ),
        positions=dataclasses.replace(
            config.positions, original_length=config.original_length, max_length=config.max_length
        ),
        mlp=dataclasses.replace(config.mlp, width=config.mlp_width),
        moe=dataclasses.replace(config.moe, width=config.expert_width),
        residual=residual.changed(
            module=kinds.modules_for(residual.kind, residual.module),
            n=residual.n or kind.default_streams,
            init=residual.init or next(iter(kind.inits), None),
            collapse=residual.collapse or (None if residual.collapse_is_fixed else next(iter(kind.collapses), None)),
        ),
        schedule=dataclasses.replace(config.schedule, decay_steps=config.decay_steps),
        validation=dataclasses.replace(config.validation, rule=config.validation.rule or "spread"),
        monitor=dataclasses.replace(config.monitor, zscore_min_history=config.zscore_min_history),
    )


def is_derived(config: Config, name: str) -> bool:
    """Return whether a field of a resolved config holds what ``resolve`` would put there.

    The config does not record which values were given, so a given value that equals the derived one counts as derived.
    The vocabulary's size never does: it is the tokeniser's, or larger.

    Args:
      config: a resolved config.
      name: the field's dotted name.
    """
    group, _, leaf = name.partition(".")
    part = getattr(config, group)
    if name == "model.vocab_size" or getattr(part, leaf) is None:
        return False
    try:
        without = dataclasses.replace(config, **{group: dataclasses.replace(part, **{leaf: None})})
        return resolve(without, config.vocab_size) == config
    except UserError:
        return False  # the field may not be None, at least not under the other values
