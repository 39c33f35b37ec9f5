"""Native checkpoints: saved in the background, published atomically, verified, loaded on any layout."""
