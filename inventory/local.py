"""The hosts that `fab local.up` booted on this machine.

Run it: `pyinfra inventory/local.py deploy/base.py`.
"""

from inventory.cluster import inventory_hosts as _inventory_hosts

nodes = _inventory_hosts("local")
