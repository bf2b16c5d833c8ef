"""Look into a model."""
