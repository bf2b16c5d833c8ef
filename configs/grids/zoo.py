"""Ask what each residual kind does at equal data: three rates of every kind, then three fresh seeds at each best rate.

The grid has two halves, each in a folder of its own. The second reads the best rates from the folder of the first:

    python -m mhc.grid run configs/grids/zoo.py --workdir runs/zoo_rates
    python -m mhc.grid run configs/grids/zoo.py:seeds=runs/zoo_rates --workdir runs/zoo_seeds
"""

from __future__ import annotations

import math
from pathlib import Path

from ml_collections import ConfigDict

from configs.grids import base
from configs.grids.base import choose
from mhc import kinds
from mhc.errors import UserError
from mhc.grid import Arms, Grid, arm, axis, chain, plan, product, seeds
from mhc.grid import folder as folders

SEEDS_OF = "seeds="  # before the folder of the first half
RATE = "optimizer.lr"


def topologies() -> Arms:
    """Return an arm for each kind of this project in its default form, and for three options that change the maths."""
    every = [name for name, kind in kinds.known().items() if kind.builder]
    return chain(
        axis("residual.kind", *every),
        arm({"residual.kind": "mhc", "residual.single_pass": True}),
        arm({"residual.kind": "attn_res", "residual.block": 2}),
        arm({"residual.kind": "plain", "residual.value_residual": True}),
    )


def get_grid(text: str = "laptop") -> Grid:
    """Return 60 arms: three rates on seed 0, or three other seeds at the rate that was best for each topology.

    Args:
      text: a size for the first half; ``seeds=FOLDER`` for the second, with the folder of the first, of its size.

    Raises:
      UserError: an unknown size; the folder holds no grid, another one, or one whose arms have not all ended; no rate
        of a topology finished.
    """
    if text.startswith(SEEDS_OF):
        size, best = best_rates(Path(text.removeprefix(SEEDS_OF)))
        return Grid(f"zoo.py:{size}", product(seeds(1, 2, 3), best))
    rates = choose(text, laptop=(3e-3, 1e-2, 3e-2), cluster=(3e-4, 1e-3, 3e-3))
    return Grid(f"zoo.py:{text}", product(seeds(0), axis(RATE, *rates), topologies()))


def best_rates(workdir: Path) -> tuple[str, Arms]:
    """Return (size, an arm for each topology with its best rate) from the results of the first half.

    The best rate is the finished arm's with the least validation loss at the end. A halted arm is no candidate.
    """
    rates = plan.read(workdir)
    size = rates.base_file.partition(":")[2]
    if Path(rates.base_file.partition(":")[0]).name != Path(__file__).name:
        raise UserError(f"{SEEDS_OF}{workdir}: it holds the grid {rates.name}, allowed: the first half of zoo")
    if rates.name.partition(":")[2].startswith(SEEDS_OF):
        raise UserError(f"{SEEDS_OF}{workdir}: it holds the second half, allowed: the folder of the first")
    left = [name for name in rates.arms if _state(rates, workdir, name) not in ("finished", "halted")]
    if left:
        raise UserError(f"{SEEDS_OF}{workdir}: {len(left)} arms have not ended, such as {left[0]}; run them first")
    losses: dict[tuple[tuple[str, object], ...], dict[float, float]] = {}
    for name, fields in rates.arms.items():
        topology = tuple((field, value) for field, value in fields.items() if field.startswith("residual."))
        loss = folders.summary(workdir / name).get("val_loss")
        finished = _state(rates, workdir, name) == "finished"
        candidates = losses.setdefault(topology, {})
        if finished and isinstance(loss, float) and math.isfinite(loss):
            candidates[fields[RATE]] = loss
    for topology, candidates in losses.items():
        if not candidates:
            words = ", ".join(f"{field}={value}" for field, value in topology)
            raise UserError(f"{SEEDS_OF}{workdir}: no rate of {words} finished with a finite loss")
    best = [{RATE: min(found, key=lambda rate: (found[rate], rate)), **dict(t)} for t, found in losses.items()]
    return size, chain(*map(arm, best))


def _state(rates: plan.Plan, workdir: Path, name: str) -> str:
    return folders.state(workdir / name, rates.config(name).train.steps)


def get_config(size: str = "laptop") -> ConfigDict:
    """Return base.py's model; on the laptop 4 blocks of it and 240 steps, for less than 40 CPU seconds an arm."""
    config = base.get_config(size)
    if size == "laptop":
        config.model.layers = 4
        config.train.steps = 240
        config.validation.every = config.checkpoint.every = 80
    return config
