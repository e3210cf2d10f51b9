"""Base models: their names, the Hub, their folders and types, the lock, the model card. No torch, apart from tiny."""
