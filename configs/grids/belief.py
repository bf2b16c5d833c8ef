"""Ask whether γ and the update scale do what a reading of the transformer as Bayesian filtering says (docs/belief.md).

Three settings of γ, the scale of the sublayers' norms, cross three of the factor of the feed-forward's output, on the
bijection, whose exact posterior is known, and on text, for plain, hc and mhc.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs.grids.base import choose
from mhc.config import default
from mhc.data.windtunnel import fields
from mhc.grid import Grid, arm, axis, chain, product, seeds

KINDS = ("plain", "hc", "mhc")
GAMMA = (
    {"norm.gamma_init": 1.0},  # trained from 1: what the others are compared with
    {"norm.gamma_init": 0.5, "norm.gamma_frozen": True},
    {"norm.gamma_init": 1.0, "norm.gamma_schedule": 0.25},
)
UPDATE = ({"update.scale": 1.0}, {"update.scale": 0.5}, {"update.scale": 1.0, "update.trained": True})


def get_grid(size: str = "laptop") -> Grid:
    """Return 54 arms of at most two minutes, of one seed; in size cluster 162, of three seeds."""
    tunnel = fields(choose(size, laptop="windtunnel:bijection,symbols=8", cluster="windtunnel:bijection"))
    steps, rows = choose(size, laptop=(600, 64), cluster=(10_000, 256))
    tasks = chain(arm(tunnel | {"train.steps": steps, "train.batch_size": rows}), arm({"data.source": "stdlib"}))
    settings = product(chain(*map(arm, GAMMA)), chain(*map(arm, UPDATE)))
    numbers = choose(size, laptop=(0,), cluster=(0, 1, 2))
    return Grid(f"belief.py:{size}", product(seeds(*numbers), tasks, axis("residual.kind", *KINDS), settings))


def get_config(size: str = "laptop") -> ConfigDict:
    """Return the base: a small model on the embedded corpus, with the probe of the gradient in γ."""
    config = default()
    config.model.layers, config.model.width, config.attention.heads = choose(
        size, laptop=(2, 64, 4), cluster=(6, 192, 6)
    )
    config.data.sequence_length = choose(size, laptop=64, cluster=512)
    config.optimizer.lr = choose(size, laptop=3e-3, cluster=1e-3)
    config.schedule.warmup_steps = choose(size, laptop=40, cluster=500)
    config.train.steps, config.train.batch_size = choose(size, laptop=(300, 16), cluster=(10_000, 128))
    config.validation.every = 0
    config.validation.rows = choose(size, laptop=256, cluster=512)
    config.checkpoint.every = 0
    config.checkpoint.keep = 1
    config.monitor.gamma = True
    config.monitor.probe_every = choose(size, laptop=50, cluster=500)
    config.monitor.progress_every = 0
    return config
