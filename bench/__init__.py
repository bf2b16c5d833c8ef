"""Measures of speed and cost, one command each, JSON out."""
