"""Compare a model's belief with the exact posterior of a wind tunnel, at every supervised place."""
