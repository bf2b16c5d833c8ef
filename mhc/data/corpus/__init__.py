"""Read corpora: documents with random access, and which of them are held out."""
