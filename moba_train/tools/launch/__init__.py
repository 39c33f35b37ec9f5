"""Starts of a run: torchrun on this machine, and the commands and manifests of schedulers."""
