"""Configurations: default.py holds every field, the other files change what they need to."""
