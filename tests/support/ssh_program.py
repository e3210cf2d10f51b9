"""What holds other programs (ssh, rsync, testinfra) to the same rules as inventory/ssh.py, and to no question."""

from inventory import ssh_program


def ssh_options(node):
    """Options for the `ssh` program that hold it to the same rules as `connect`."""
    return [*ssh_program.ssh_options(node), "-o", "BatchMode=yes"]


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
