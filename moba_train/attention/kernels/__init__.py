"""Attention to selected blocks: what every block-sparse kind is built on. A selector says which blocks."""
