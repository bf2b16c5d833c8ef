"""Configurations: default.py makes every field, the other files change what they need to."""
