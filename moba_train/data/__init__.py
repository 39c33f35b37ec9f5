"""Data pipeline from corpora on disk to micro-batches. Only stage_data, batch and loader need torch."""
