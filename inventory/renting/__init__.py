"""Renting machines: what a cluster needs, what there is, and the steps between. `inventory.ecs` does the calls."""
