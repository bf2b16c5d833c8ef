"""Estimate the cost of a grid from shapes alone: nothing is compiled, and no parameter is allocated."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

from mhc import config as configs
from mhc.chips import PEAK_FLOPS
from mhc.config import Config, MeshConfig, ScheduleConfig
from mhc.errors import UserError, did_you_mean
from mhc.grid.plan import Plan

# Fields that change neither shapes nor FLOPs: arms that differ in them alone are counted once.
_SHAPELESS = {
    "optimizer": ("lr", "b1", "b2", "eps", "weight_decay", "clip_norm"),
    "residual": ("scale", "alpha", "res_gap", "iters", "rms_eps", "map_eps", "sinkhorn_eps"),
    "init": ("kind", "std", "scale_residual"),
    "seed": ("init", "data"),
    "schedule": tuple(field.name for field in dataclasses.fields(ScheduleConfig)),
    "train": ("steps", "init_from", "init_optimizer", "init_data"),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Holds the cost of one arm."""

    params: int
    tokens: int
    """Positions of all batches, padding included."""
    flops: float
    """Matrix FLOPs of the whole training, as of mhc.model.flops; recomputation under remat is not counted."""
    device_hours: float
    checkpoint_bytes: int
    """Bytes of one checkpoint: parameters, optimiser state and counters, uncompressed."""
    kept_bytes: int
    """Bytes of all checkpoints that are kept at the end."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Says how fast a device is assumed to train."""

    tokens_per_second: float | None
    """Tokens per second of one device, measured; None: FLOPs over mfu × peak."""
    chip: str
    mfu: float
    peak: float
    """FLOP/s of the chip."""

    def words(self) -> str:
        """Return the assumption in words."""
        if self.tokens_per_second is not None:
            return f"{self.tokens_per_second:,.0f} tokens/s a device, as given"
        return f"{self.mfu:.0%} of the {self.peak / 1e12:,.0f} TFLOP/s (bfloat16, dense) of one {self.chip}"

    def hours(self, flops: float, tokens: int) -> float:
        """Return the device-hours of a training."""
        seconds = tokens / self.tokens_per_second if self.tokens_per_second else flops / (self.mfu * self.peak)
        return seconds / 3600


def speed(tokens_per_second: float | None, chip: str, mfu: float) -> Speed:
    """Return the Speed of the command line's options. Raises UserError for an unknown chip or a value out of range."""
    if chip not in PEAK_FLOPS:
        known = ", ".join(PEAK_FLOPS)
        raise UserError(f"--chip: given {chip!r}, allowed: one of {known}{did_you_mean(chip, PEAK_FLOPS)}")
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu: given {mfu}, allowed: a number > 0 and <= 1")
    if tokens_per_second is not None and not (tokens_per_second > 0 and math.isfinite(tokens_per_second)):
        raise UserError(f"--tokens_per_second: given {tokens_per_second}, allowed: a number > 0")
    return Speed(tokens_per_second, chip, mfu, PEAK_FLOPS[chip])


def costs(plan: Plan, assumed: Speed) -> dict[str, Cost]:
    """Return the Cost of every arm. Raises UserError where a tokeniser cannot be read or does not fit."""
    import jax

    from mhc.data import tokenizers

    # Keys of abstract evaluation are arrays: without this they would claim an accelerator's memory.
    jax.config.update("jax_platforms", "cpu")
    vocabulary = functools.cache(lambda path: tokenizers.load(path).vocab_size)

    def cost(arm: str) -> Cost:
        config = plan.config(arm)
        config = configs.resolve(config, vocabulary(config.data.tokenizer))
        params, per_token, checkpoint = _sizes(_shape_key(config))
        tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
        flops = float(per_token) * tokens
        policy, steps = config.checkpoint, config.train.steps
        kept = policy.keep + (steps // policy.keep_every if policy.keep_every else 0)
        written = max(1, -(-steps // policy.every)) if policy.every else 1
        return Cost(params, tokens, flops, assumed.hours(flops, tokens), checkpoint, checkpoint * min(kept, written))

    return {arm: cost(arm) for arm in plan.arms}


def _shape_key(config: Config) -> str:
    tree = configs.to_dict(config)
    neutral = configs.to_dict(Config())
    for group, fields in _SHAPELESS.items():
        for field in fields:
            tree[group][field] = neutral[group].get(field, configs.default_of(f"{group}.{field}"))
    tree["mesh"] = dataclasses.asdict(MeshConfig())
    return json.dumps(tree, sort_keys=True)


@functools.cache
def _sizes(key: str) -> tuple[int, int, int]:
    """Return (parameters, FLOPs of a token, bytes of a checkpoint) for a resolved config."""
    import jax

    from mhc.model.flops import flops_per_token
    from mhc.sharding import make_mesh
    from mhc.train.step import Trainer

    config = configs.from_json(key)
    state: Any = Trainer(config, make_mesh(config.mesh, jax.devices("cpu")[:1])).abstract
    params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    bytes_of = (math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return params, flops_per_token(config), sum(bytes_of)
