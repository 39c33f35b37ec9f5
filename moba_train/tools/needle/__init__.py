"""Evaluations that hide numbers in long texts and ask for them."""
