"""Renting machines: what a cluster needs, what there is, and the steps between. The cloud is `inventory.cloud`."""
