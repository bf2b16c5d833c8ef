"""Hold programs for people who change this project; none is needed to use it."""
