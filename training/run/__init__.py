"""A run: its folder, launch, events, causes of its end, checkpoints as files. No torch."""
