"""Measure how far the context reaches."""
