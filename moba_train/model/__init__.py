"""The model on one device: no torch.distributed here."""
