"""Measure speed and cost, a command for each measure, with JSON as output."""
