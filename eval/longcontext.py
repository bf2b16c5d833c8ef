"""Run `mhc.eval.longcontext`: ``python -m eval.longcontext``."""

from mhc import cli
from mhc.eval.longcontext.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
