"""Programs that run on nodes and import nothing of spotune; snapshots/node_disks.py finds them."""
