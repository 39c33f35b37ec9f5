"""AdamW by kernels of other packages."""
