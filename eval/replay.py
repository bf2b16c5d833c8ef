"""Run `mhc.eval.replay`: ``python -m eval.replay``."""

from mhc import cli
from mhc.eval.replay import main

if __name__ == "__main__":
    cli.run_main(main)
