"""Read documents of a corpus at random, and hold some of them out."""
