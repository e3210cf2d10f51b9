"""A node, from bare machine to member of the cluster.

Run it: `pyinfra inventory/static.py deploy/base.py`, on rented machines as `fab up` says (`-y`: to be asked nothing).
A second run changes nothing.
"""

from deploy.models import fetch_models
from deploy.network import name_nodes
from deploy.node_operation import deploy_alone, tell_operation_times
from deploy.nvidia import install_driver
from deploy.packages import install_packages
from deploy.python_env import build_environment
from deploy.spot import watch_for_notices
from deploy.storage import mount_data_disk, mount_restored_disk, record_disk
from deploy.trust import share_trust

deploy_alone()
tell_operation_times()
mount_restored_disk()  # the packages a snapshot brought along
install_packages()
name_nodes()
share_trust()  # names first: host keys are known by name
watch_for_notices()  # over that trust, and before the long part: the machine may be taken back meanwhile
mount_data_disk()
record_disk()
install_driver()
build_environment()  # on /data, and over the trust between the nodes
fetch_models()  # with the environment's own hf
