"""Run lm-evaluation-harness."""
