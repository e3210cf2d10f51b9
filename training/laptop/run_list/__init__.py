"""The runs here and on the head: fab runs, fab runs.delete."""
