"""Programs that run on nodes: each file alone, by whatever python3 is there. What they do is called by deploy/*.py."""
