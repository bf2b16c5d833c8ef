"""Tokenise documents, put them in order, and pack them into rows."""
