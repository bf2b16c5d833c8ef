"""Compare runs."""
