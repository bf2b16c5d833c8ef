"""Run `mhc.eval.mappings`: ``python -m eval.mappings``."""

from mhc import cli
from mhc.eval.mappings import main

if __name__ == "__main__":
    cli.run_main(main)
