"""Transports: how queries and keys of different ranks meet, one file for each."""
