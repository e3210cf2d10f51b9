"""How a model is spread over the ranks: a module each, behind the interface of strategy.py."""
