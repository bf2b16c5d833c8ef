"""Training: the loop, the compiled step, optimisers, checkpoints."""
