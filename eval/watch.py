"""Run `mhc.eval.watch`: ``python -m eval.watch``."""

from mhc import cli
from mhc.eval.watch import main

if __name__ == "__main__":
    cli.run_main(main)
