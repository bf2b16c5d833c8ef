"""Score checkpoints on a corpus."""
