"""Muon, and the exchange of whole matrices that it needs."""
