"""Share what the evaluation programs need: checkpoints, programs over them, statistics, figures, pages."""
