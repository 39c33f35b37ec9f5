"""Programs that print and save the numbers we claim; their results are in benchmarks/results."""
