"""`moba-data`: from raw text and conversations to training corpora."""
