"""Run `mhc.eval.perplexity`: ``python -m eval.perplexity``."""

from mhc import cli
from mhc.eval.perplexity.__main__ import main

if __name__ == "__main__":
    cli.run_main(main)
