"""Hold the ready configurations: default.py lists every field, the other files change some of them."""
