"""The machines that `fab up` rented, found by their tags.

Run it: `pyinfra inventory/aliyun.py deploy/base.py`.
"""

from inventory.cluster import inventory_hosts as _inventory_hosts

nodes = _inventory_hosts("inventory/aliyun.py")
