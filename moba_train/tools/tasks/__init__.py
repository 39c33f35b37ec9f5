"""Tasks with right answers about long texts: those of RULER, our own, and those of files."""
