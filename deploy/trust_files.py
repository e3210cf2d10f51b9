"""The files that let the nodes of one cluster, and nobody else, reach each other by ssh. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.managed_block import outside, with_block
from deploy.refusal import REFUSED

KEY_PATH = "/root/.ssh/id_cluster"
SSHD_DROP_IN = "/etc/ssh/sshd_config.d/10-spotune.conf"
OPEN_LOGINS = (
    "told=$(sshd -T 2>&1) || echo 'sshd -T fails'; printf '%s\\n' \"$told\" | "
    "grep -ixE '(passwordauthentication|kbdinteractiveauthentication|permitrootlogin) yes' || true"
)
"""Shell that prints what sshd's files, all of them together, still let in by password; nothing where all is shut."""


@dataclass(frozen=True)
class NodeKeys:
    """What a node shows of itself: the public halves, as `type base64`."""

    name: str
    private_address: str
    cluster_key: str
    host_key: str


def public_key(line: str) -> str:
    """`type base64` of a public key line, its comment dropped."""
    return " ".join(line.split()[:2])


def authorized_keys(text: str, peers: Sequence[NodeKeys]) -> str:
    """root's authorized_keys: what stands there already, and one block with a line a node.

    Each key is good only from its own node's private address, and for nothing but commands.
    """
    lines = [
        f'from="{p.private_address}",no-agent-forwarding,no-port-forwarding,no-X11-forwarding '
        f"{p.cluster_key} spotune:{p.name}"
        for p in peers
    ]
    return with_block(outside(text), lines)


def known_hosts(text: str, peers: Sequence[NodeKeys]) -> str:
    """/etc/ssh/ssh_known_hosts: one line a node, under its name and its private address.

    Lines elsewhere in the file that speak of those names or addresses are dropped: they are older than ours.
    """
    ours = {known for p in peers for known in (p.name, p.private_address)}
    kept = [line for line in outside(text) if not ours.intersection(line.split(" ")[0].split(","))]
    return with_block(kept, [f"{p.name},{p.private_address} {p.host_key}" for p in peers])


def client_config(names: Sequence[str], addresses: Sequence[str]) -> str:
    """/etc/ssh/ssh_config.d/10-spotune.conf: how one node calls another. Strict, silent, and soon to notice
    that the other side is gone (15 s): a launcher must not hang on a machine that was taken away.
    """
    return (
        f"Host {' '.join([*names, *addresses])}\n"
        "  User root\n"
        f"  IdentityFile {KEY_PATH}\n"
        "  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking yes\n"
        "  BatchMode yes\n"
        "  ConnectTimeout 5\n"
        "  ServerAliveInterval 5\n"
        "  ServerAliveCountMax 3\n"
    )


SSHD_CONFIG = """\
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
ClientAliveInterval 10
ClientAliveCountMax 3
MaxStartups 100:30:200
"""
"""sshd drop-in. sshd takes the first value it meets, so the file sorts before 50-cloud-init.conf."""


def look_at_sshd(drop_in: str = SSHD_DROP_IN) -> str:
    """Shell that prints every reason why password logins may still be possible, or one line: shut."""
    pending = f"[ ! -e {drop_in}.new ] || echo 'new settings that sshd has not taken up'"
    return f'reasons=$({OPEN_LOGINS}; {pending}); echo "${{reasons:-shut}}"'


def apply_sshd(drop_in: str = SSHD_DROP_IN) -> str:
    """Shell that puts DROP_IN.new in DROP_IN's place and has sshd take it up, or leaves all as it was.

    The .new goes last: while it is there, the running sshd may have older settings than its files.
    """
    return f"""\
set -e
file={drop_in}; new=$file.new; old=$file.before
undo() {{
  if [ -e $old ]; then mv $old $file; else rm -f $file; fi
  echo "$1; the old settings are back" >&2; exit {REFUSED}
}}
if [ -e $file ]; then cp -p $file $old; else rm -f $old; fi
cp -p $new $file
sshd -t || undo 'sshd refuses the new settings'
open=$({OPEN_LOGINS})
[ -z "$open" ] || undo "sshd still says '$(echo $open)' with $file in place (the first line of \
/etc/ssh/sshd_config must be: Include /etc/ssh/sshd_config.d/*.conf)"
systemctl try-reload-or-restart ssh || undo 'sshd could not be reloaded'
rm -f $old $new
"""
