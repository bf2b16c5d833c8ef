"""Run `mhc.eval.regression`: ``python -m eval.regression``."""

from mhc import cli
from mhc.eval.regression.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
