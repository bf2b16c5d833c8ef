"""Ready grids; docs/grids.md says what each asks."""
