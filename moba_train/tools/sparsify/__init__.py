"""`moba-train sparsify`: a trained model becomes a sparse one, next to full attention on the same batches."""
