"""Run `mhc.eval.windtunnel`: ``python -m eval.windtunnel``."""

from mhc import cli
from mhc.eval.windtunnel.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
