"""Train one model: the program ``python -m mhc.train``, as a checkout has it.

python train.py --config configs/demo.py --config.residual.kind=mhc --workdir runs/a
"""

from __future__ import annotations

from mhc import cli
from mhc.train.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
