"""Object stores and other places that are not on this machine, by fsspec."""
