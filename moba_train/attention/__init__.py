"""Attention on one device, or on any subset of the keys."""
