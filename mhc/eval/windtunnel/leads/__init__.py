"""Find which measures of a belief leave their healthy band before the loss is flagged, and by how many steps."""
