"""Disks back in time: the environment kept as a snapshot of a data disk, and clusters rebuilt from it."""
