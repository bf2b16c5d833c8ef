"""Define the format of a prepared folder: its manifest, and the records and tables of its shards."""
