"""`moba-train convert`: Hugging Face models in and out, a tensor at a time."""
