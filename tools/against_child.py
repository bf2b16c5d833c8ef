"""Run a job of `tools.against` in a process of its own: the code under a folder, and no other.

The argument is a job as JSON: ``root`` (the folder with mhc, configs and train.py) and ``do``. ``train``: train.py with
``arguments``. ``cost``: what one compiled step of each of ``configs`` (nested, by name) costs, as JSON on stdout.

It uses only those parts of mhc that stay the same from version to version.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

OURS = ("mhc", "configs", "eval", "train")


def check_imports(root: Path) -> None:
    """Exit with a line where a module of this project was imported from outside of ``root``."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OURS and file is not None and not Path(file).resolve().is_relative_to(root):
            sys.exit(f"{name} was imported from {file}, not from {root}")


def train(root: Path, arguments: list[str]) -> None:
    """Run train.py as the command line does; leaves with its exit code."""
    sys.argv = [str(root / "train.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        check_imports(root)


def cost(config: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return {"flops", "bytes accessed"} of one compiled training step on one device, as XLA counts them.

    The body of a loop counts once, however often it runs: `tools.against` asks for unrolled blocks as well.
    """
    import jax
    import jax.numpy as jnp

    from mhc.config import from_config_dict, resolve
    from mhc.data import tokenizers
    from mhc.sharding import make_mesh
    from mhc.train.step import Trainer

    resolved = from_config_dict(config)
    resolved = resolve(resolved, tokenizers.load(resolved.data.tokenizer).vocab_size)
    trainer = Trainer(resolved, make_mesh(resolved.mesh, jax.devices()[:1]))
    rows = (resolved.train.batch_size, resolved.data.sequence_length)
    names = ("tokens", "targets", "segment_ids", "positions", "weights", "target_bytes")
    batch = {name: jax.ShapeDtypeStruct(rows, jnp.float32 if name == "weights" else jnp.int32) for name in names}
    step: Any = trainer.step
    analysis = step.lower(trainer.abstract, batch).compile().cost_analysis()
    return {name: float(analysis[name]) for name in ("flops", "bytes accessed")}


def main(job: dict[str, Any]) -> None:
    """Read the job from the command line and do it."""
    import mhc

    root = Path(job["root"])
    if not Path(str(mhc.__file__)).resolve().is_relative_to(root):
        sys.exit(f"mhc was imported from {mhc.__file__}, not from {root}")
    if job["do"] == "train":
        train(root, job["arguments"])
    else:
        costs = {name: cost(config) for name, config in job["configs"].items()}
        check_imports(root)
        print(json.dumps(costs))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
