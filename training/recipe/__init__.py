"""What to train: the recipe, its tables, and recipes derived from a model of known shape. Pure."""
