"""Faults that the comparison must find."""
FAULTS = {}
