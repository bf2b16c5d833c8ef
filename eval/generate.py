"""Run `mhc.eval.generate`: ``python -m eval.generate``."""

from mhc import cli
from mhc.eval.generate.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
