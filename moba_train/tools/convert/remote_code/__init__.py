"""Code that an export takes with it: run by transformers, without this package."""
