"""Write the report of a comparison: one HTML file that needs nothing beside it."""
