"""Ask whether a belief wears away before the loss shows it: five topologies at four fixed rates, three seeds.

A belief must be there before it can wear away. So each topology first learns the bijection of 8 symbols at the lowest
rate, and three arms go on from its step 160 at higher rates, with a new optimiser and a warm-up, while the first goes
on as it was. A checkpoint is kept every ten steps, for ``eval.windtunnel --leads``.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import windtunnel_bijection
from configs.grids.base import choose
from mhc.grid import Grid, arm, axis, branches, chain, product, seeds

KINDS = ("plain", "hc", "mhc", "mhc_lite", "identity")


def get_grid(size: str = "laptop") -> Grid:
    """Return 15 arms at the lowest rate and 45 that branch from them, at 3, 10 and 30 times that rate.

    The highest rate destroys the belief of some topologies. In size cluster the model is the paper's.
    """
    start, steps, warmup = choose(size, laptop=(160, 160, 96), cluster=(2000, 2000, 1200))
    rates = choose(size, laptop=(1e-2, 3e-2, 1e-1), cluster=(3e-3, 1e-2, 3e-2))
    trunks = product(seeds(0, 1, 2), axis("residual.kind", *KINDS))
    restart = {"train.init_optimizer": False, "train.steps": steps, "schedule.warmup_steps": warmup}
    changes = product(axis("optimizer.lr", *rates), arm(restart))
    return Grid(f"windtunnel.py:{size}", chain(trunks, branches(trunks, start, changes)))


def get_config(size: str = "laptop") -> ConfigDict:
    """Return the arm at the lowest rate: constant after a warm-up, with checkpoints at equal distances."""
    config = windtunnel_bijection.get_config(choose(size, laptop="laptop", cluster="paper"))
    config.schedule.kind = "constant"
    config.schedule.warmup_steps = choose(size, laptop=40, cluster=500)
    config.train.steps, config.train.batch_size = choose(size, laptop=(320, 32), cluster=(4000, 256))
    config.checkpoint.every = config.checkpoint.keep_every = choose(size, laptop=10, cluster=100)
    config.checkpoint.keep = 1
    config.validation.every = 0
    config.validation.rows = 64
    config.monitor.probe_every = choose(size, laptop=10, cluster=100)
    config.monitor.progress_every = 0
    return config
