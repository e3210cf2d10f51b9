"""What holds other programs (ssh, rsync, testinfra) to the same rules as inventory/ssh.py."""

from inventory.ssh import CONNECT_TIMEOUT_S


def ssh_options(node):
    """Options for the `ssh` program that hold it to the same rules as `connect`."""
    return [
        "-i",
        str(node.key),
        "-p",
        str(node.port),
        "-o",
        f"UserKnownHostsFile={node.known_hosts}",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    ]


def ssh_config(nodes, control_folder):
    """An ssh_config for other programs (testinfra, ssh, rsync): `ssh -F FILE te1`.

    Connections are shared through sockets in `control_folder`, whose path must stay short (104 bytes in all).
    """
    return "".join(
        f"Host {n.name}\n"
        f"  HostName {n.address}\n  Port {n.port}\n  User {n.user}\n  IdentityFile {n.key}\n"
        f"  UserKnownHostsFile {n.known_hosts}\n  StrictHostKeyChecking yes\n  IdentitiesOnly yes\n"
        f"  BatchMode yes\n  ControlMaster auto\n  ControlPersist 60\n  ControlPath {control_folder}/%C\n\n"
        for n in nodes
    )
