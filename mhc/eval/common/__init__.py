"""Modules that the evaluation programs share: checkpoints, programs over them, statistics, figures, pages."""
