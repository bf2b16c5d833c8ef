"""Make the steps that several measures run: the config of the yardstick's architecture, and random batches."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from bench import arguments
from mhc import cli
from mhc import config as configs
from mhc.config import Config
from mhc.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a step; the defaults are those of docs/performance.md."""

    width: int = 512
    blocks: int = 4
    heads: int = 8
    length: int = 512
    batch: int = 8
    vocabulary: int = 259

    def config(self, kind: str, **monitor: Any) -> Config:
        """Return the config of a step whose model and optimiser are those of ``bench.reference.plain_step``."""
        groups: dict[str, dict[str, Any]] = {
            "model": {"layers": self.blocks, "width": self.width, "vocab_size": self.vocabulary},
            "attention": {"heads": self.heads},
            "positions": {"kind": "learned"},
            "norm": {"kind": "layernorm"},
            "mlp": {"kind": "gelu"},
            "head": {"tied": True},
            "residual": {"kind": kind},
            "data": {"sequence_length": self.length},
            "train": {"batch_size": self.batch, "steps": 1000},
            "monitor": monitor,
        }
        return configs.resolve(configs.from_config_dict(groups), self.vocabulary)


_OPTIONS = ("width", "blocks", "heads", "length", "batch")


def add_sizes(parser: cli.Parser, default: Sizes, *, without: str = "") -> None:
    """Add an option for each size but ``without``."""
    for name in _OPTIONS:
        if name != without:
            value = getattr(default, name)
            parser.add_argument(f"--{name}", type=int, default=value, help=f"of the step (default {value})")


def sizes_of(options: argparse.Namespace, default: Sizes, *, without: str = "") -> Sizes:
    """Return the sizes that the options of ``add_sizes`` give.

    Raises:
      UserError: a size below 1, or heads that do not divide the width.
    """
    names = [name for name in _OPTIONS if name != without]
    given = {name: arguments.at_least(getattr(options, name), f"--{name}") for name in names}
    sizes = dataclasses.replace(default, **given)
    if sizes.width % sizes.heads:
        raise UserError(f"--heads: {sizes.heads}, allowed: a divisor of --width {sizes.width}")
    return sizes


def random_batch(config: Config, seed: int = 0) -> dict[str, Any]:
    """Return a batch of random tokens on the host, one document a row: they cost what text costs."""
    import numpy as np

    rng, shape = np.random.default_rng(seed), (config.train.batch_size, config.data.sequence_length)
    tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        "weights": np.ones(shape, np.float32),
    }


def stepping(step: Callable[..., tuple[Any, Any]], state: Any, *batch: Any) -> Callable[[], Any]:
    """Return a function that takes the next ``step(state, *batch) -> (state, measured)`` each time it is called."""
    carry = [state]

    def next_step() -> Any:
        carry[0], measured = step(carry[0], *batch)
        return carry[0], measured

    return next_step
