"""Measure speed and cost; each measure is a command of its own that writes JSON."""
