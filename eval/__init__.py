"""Run evaluation programs that read runs and checkpoints, each started as ``python -m eval.<name>``."""
