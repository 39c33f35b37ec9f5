"""The HTML report of runs, comparisons and scaling fits."""
