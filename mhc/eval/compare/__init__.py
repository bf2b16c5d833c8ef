"""Compare runs in a report with figures, as `mhc.eval.compare.__main__` describes."""
