"""Make rows of tokens: documents are tokenised, put in order and packed."""
