"""Ask how long to train: warm-up, a stable rate, and several decays branched from each topology's one stable run."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs.grids import base
from configs.grids.base import choose
from mhc.grid import Grid, arm, axis, branches, chain, product, seeds

SHAPE = {"schedule.kind": "wsd", "schedule.wsd_shape": "sqrt"}


def get_grid(size: str = "laptop") -> Grid:
    """Return 9 arms: the stable runs of plain, hc and mhc, and two decays of each.

    In cluster size there are 36: three seeds and three decays. A decay takes the last fifth of the steps up to its end,
    as 1 - sqrt(progress) (arXiv:2405.18392).
    """
    numbers = choose(size, laptop=(0,), cluster=(0, 1, 2))
    decays = choose(size, laptop={120: 30, 240: 60}, cluster={2000: 500, 4000: 1000, 8000: 2000})
    stable = product(seeds(*numbers), axis("residual.kind", "plain", "hc", "mhc"))
    decayed = [
        branches(stable, step, arm({**SHAPE, "schedule.wsd_steps": count, "train.steps": count}))
        for step, count in decays.items()
    ]
    return Grid(f"wsd.py:{size}", chain(stable, *decayed))


def get_config(size: str = "laptop") -> ConfigDict:
    """Return the stable run: base.py's model at a constant rate, which keeps the checkpoints that decays start from."""
    config = base.get_config(size)
    config.schedule.kind = "constant"
    config.schedule.final_ratio = 0.0  # of the decays
    config.train.steps = choose(size, laptop=240, cluster=8000)
    config.checkpoint.every = choose(size, laptop=120, cluster=500)
    config.checkpoint.keep_every = choose(size, laptop=120, cluster=2000)
    return config
