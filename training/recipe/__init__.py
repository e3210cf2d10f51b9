"""What to train: the recipe, its tables, and the rules that its keys obey. Pure."""
