"""Run `mhc.eval.harness`: ``python -m eval.harness``."""

from mhc import cli
from mhc.eval.harness.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
