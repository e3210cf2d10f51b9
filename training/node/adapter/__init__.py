"""After training: ask a tuned model, measure it, merge its adapter into the base."""
