"""A recipe resolved: combinations that cannot work are refused before any GPU is touched."""
