"""Hold the ready grids; docs/grids.md says which question each answers."""
