"""A tuned model from your machine: ask it, measure it, merge it, give it away."""
