"""Run `mhc.eval.compare`: ``python -m eval.compare``."""

from mhc import cli
from mhc.eval.compare.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
