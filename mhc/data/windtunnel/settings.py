"""Check and set what a config must say to train on a wind tunnel."""

from __future__ import annotations

from typing import Any

from mhc.config import Config
from mhc.data.windtunnel.tasks import is_windtunnel, task
from mhc.errors import UserError, did_you_mean
from mhc.rules import refuse


def fields(source: str) -> dict[str, Any]:
    """Return {dotted field: value} of all that a task decides: source, tokeniser, length of a sequence and classes.

    Raises:
        UserError: ``source`` names no task.
    """
    chosen = task(source)
    return {
        "data.source": source,
        "data.tokenizer": source,
        "data.sequence_length": chosen.length,
        "head.classes": chosen.classes,
    }


def check_model(config: Config) -> None:
    """Refuse a model that cannot learn the task of ``data.source``: other classes, or too few learned positions.

    Raises:
        UserError: the model cannot, or ``head.classes`` is given although the data is text.
    """
    source = config.data.source
    if not is_windtunnel(source):
        if config.head.classes is not None:
            refuse("head.classes", config.head.classes, f"None with data.source={source}, whose targets are token ids")
        return
    chosen = task(source)
    if config.head.classes != chosen.classes:
        refuse("head.classes", config.head.classes, f"{chosen.classes} with data.source={source}")
    if config.positions.kind == "learned" and config.max_length < chosen.span:
        refuse("positions.max_length", config.positions.max_length, f"at least {chosen.span} with data.source={source}")


def config_sizes(config: Any, size: str, **sources: str) -> Any:
    """Return a ConfigDict set up for the task of a size, trained as the paper does: AdamW, clipped at 1, warmed up.

    Args:
        config: the defaults.
        size: a name among ``sources``.
        sources: the task of each size.

    Raises:
        UserError: there is no such size.
    """
    if size not in sources:
        raise UserError(f"size: given {size!r}, allowed: {', '.join(sources)}{did_you_mean(size, sources)}")
    for field, value in fields(sources[size]).items():
        group, _, name = field.partition(".")
        config[group][name] = value
    config.optimizer.clip_norm = 1.0
    config.schedule.kind = "cosine"
    config.schedule.warmup_steps = 100
    config.validation.rows = 512
    config.validation.every = 500
    config.monitor.tensorboard = False
    return config
