"""Find and read the user's files: the glob that names them, their formats, and plain local copies of them."""
