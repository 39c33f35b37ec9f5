"""Tasks with right answers about long texts: RULER's machinery, and tasks of our own or from files."""
