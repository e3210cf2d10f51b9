"""The machines listed in cluster.toml.

Run it: `pyinfra inventory/static.py deploy/base.py`.
"""

from inventory.cluster import inventory_hosts as _inventory_hosts

nodes = _inventory_hosts("inventory/static.py")
