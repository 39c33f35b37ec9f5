"""Evaluations that run inside training and from the command line."""
