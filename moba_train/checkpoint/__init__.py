"""Checkpoints: saved in the background, published atomically, verified, loaded on any layout."""
