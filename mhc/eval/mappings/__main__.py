"""Run ``python -m mhc.eval.mappings``."""

from mhc import cli
from mhc.eval.mappings.program import main

if __name__ == "__main__":
    cli.run_main(main)
