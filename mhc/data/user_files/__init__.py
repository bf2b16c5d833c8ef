"""Find the user's files by a glob, tell their formats, and make plain local copies of them."""
