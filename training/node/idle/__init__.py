"""The head's own watch for `hours_idle`: what needs no laptop. Standard library only."""
