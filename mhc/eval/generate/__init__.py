"""Generate text."""
