"""Run `mhc.eval.inspect`: ``python -m eval.inspect``."""

from mhc import cli
from mhc.eval.inspect.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
