"""fab trust: whose host keys are trusted; fab ssh: a shell on a node; fab notify: who is told of a run. fab local.* are
beside the local cloud."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

from invoke import Collection, Exit, task

from inventory.command_line import agreed, say, sentences
from inventory.errors import FAILURE
from inventory.localcloud.tasks import local
from training.text.deferred import deferred

with deferred():
    from inventory import cluster as clusters
    from inventory import hostkeys, known_hosts, notify_services, ssh_program
    from inventory import nodes as node_list
    from inventory import settings as cluster_toml
    from inventory.renting import lease

if TYPE_CHECKING:
    from inventory.hostkeys import HostKey, KeyChange

_COMPARE = "compare the fingerprint with the provider's console"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_OTHER_KEYS = (
    "the machine was made anew, or another one answers in its place. If it was made anew: "
    "fab trust --fingerprint SHA256:... with the one that the provider's console shows"
)


@task(
    help={
        "yes": "accept keys of new machines without asking; a changed key is never accepted",
        "fingerprint": "SHA256:... from the provider's console; accepts that key, also a changed one, without asking; "
        "repeatable",
    },
    iterable=["fingerprint"],
)
def trust(c: Any, fingerprint: list[str], yes: bool = False) -> None:
    """Show the machines' host keys and store those you accept."""
    with sentences():
        settings = cluster_toml.load_settings()
        if not settings.is_listed:
            raise cluster_toml.SettingsError(
                "fab trust is for machines listed in cluster.toml; the keys of rented ones come with `fab up`"
            )
        for each in fingerprint:
            if not _FINGERPRINT.fullmatch(each):
                raise cluster_toml.SettingsError(
                    f"--fingerprint {each!r}: SHA256: and 43 letters are expected, as ssh-keygen -l prints"
                )
        known = settings.ssh.known_hosts
        if note := known_hosts.parse_known_hosts(hostkeys.read(known)).note:
            say(f"{known}: {note}")
        nodes = node_list.static_nodes(settings)
        hops = {(hop.address, hop.port): hop for node in nodes for hop in node.hops}
        silent = [node.name for node in (*hops.values(), *nodes) if not _trust_node(node, yes, fingerprint)]
    if silent:
        raise Exit(f"not trusted: {', '.join(silent)}", code=1)


def _trust_node(node: Any, yes: bool, fingerprints: list[str]) -> bool:
    """Bring known_hosts up to date for one machine; whether it is trusted now."""
    shown = hostkeys.ask(node)
    if not shown:
        say(f"{node.name} ({node.address}:{node.port}) shows no host key: is it up, and its port {node.port} open?")
        return False
    text = hostkeys.read(node.known_hosts)
    change = hostkeys.compare(text, known_hosts.known_host_name(node.address, node.port), shown)
    if not change.new:
        say(f"{node.name}: {node.known_hosts} revokes every key that it shows")
        return False
    if change.is_known:
        say(f"{node.name}: known")
        return True
    for key in change.old:
        say(f"{node.name}: {'was   ' if key in change.replaced else 'known '} {key.kind} {key.fingerprint}")
    for key in change.new:
        say(f"{node.name}: shows  {key.kind} {key.fingerprint}")
    accepted = _accepted(node.name, change, yes, fingerprints)
    if accepted:
        hostkeys.write(node.known_hosts, hostkeys.updated(text, change, accepted))
    return bool(accepted)


def _accepted(name: str, change: KeyChange, yes: bool, fingerprints: list[str]) -> tuple[HostKey, ...]:
    """The shown keys to remember: those named, else all if that is agreed to."""
    if named := tuple(key for key in change.new if key.fingerprint in fingerprints):
        return named
    if fingerprints:
        say(f"{name}: none of these keys has a fingerprint that was given")
        return ()
    if not change.old:  # else what it shows anew may be another machine's, of whatever kind it is
        return change.new if yes or agreed(f"{name}: trust it?", f"{_COMPARE}; --yes trusts new machines") else ()
    if yes:
        say(f"{name}: keys are known and these are others: {_OTHER_KEYS}")
        return ()
    return (
        change.new
        if agreed(f"{name}: keys are known and these are others. Trust these?", f"{_COMPARE}; {_OTHER_KEYS}")
        else ()
    )


@task(
    name="ssh",
    auto_shortflags=False,
    help={
        "node": "node name, such as te2; can be given without the flag: fab ssh te2. Default: the head",
        "command": "run this command instead of a shell; same as: fab ssh te2 -- nvidia-smi",
    },
)
def open_shell(c: Any, node: str = "", command: str = "") -> None:
    """Open a shell on a node, or run a command there, its host key verified."""
    with sentences():
        cluster = clusters.load_cluster()
        argv = ssh_program.ssh_argv(ssh_program.node_named(cluster.nodes, node), command)
        lease.restore(cluster.settings)
        sys.stdout.flush()
        try:
            os.execvp(argv[0], argv)
        except FileNotFoundError:
            raise Exit("there is no ssh program on this machine; install OpenSSH's client", code=1) from None


@task(auto_shortflags=False, help={"test": "send a test message to every address"})
def notifications(c: Any, test: bool = False) -> None:
    """Show who is notified of what becomes of a run, or send a test message."""
    with sentences():
        settings = cluster_toml.load_settings()
        addresses = notify_services.configured_addresses(settings)
        if not addresses:
            other = notify_services.VARIABLE
            none = f"notifications are off: {settings.notify.file} has no address, and {other} is not set"
            if test:
                raise notify_services.NotifyError(none)
            say(none)
            return
        if not test:
            say(f"to: {', '.join(address.scheme for address in addresses)}")
            say(f"on: {', '.join(settings.notify.on) or 'nothing'}")
            return
        outcomes = notify_services.deliver(addresses, f"test message of {settings.name}", "Notifications arrive here.")
        for address, reason in zip(addresses, outcomes, strict=True):
            say(f"{address.scheme}: {f'not sent: {reason}' if reason else 'sent'}")
    if any(outcomes):
        raise Exit(f"{sum(map(bool, outcomes))} of {len(outcomes)} not sent", FAILURE)


notify_tasks = Collection("notify")
notify_tasks.add_task(notifications, name="run", default=True)
namespace = Collection(local, notify_tasks, open_shell, trust)
