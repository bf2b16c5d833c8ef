"""Draw the figures of a comparison, one file for each section of the report."""
