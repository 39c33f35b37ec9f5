"""The recipe: its schema (one file a section), loading."""
