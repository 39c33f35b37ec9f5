"""Programs that print and save the numbers we claim; benchmarks/README.md is their table of contents."""
