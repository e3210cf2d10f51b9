"""fab trust: whose host keys are trusted. fab local.* are beside the local cloud."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from invoke import Collection, Exit, task

from inventory.command_line import agreed, one_sentence
from inventory.localcloud.tasks import local


def _one_sentence() -> AbstractContextManager[None]:
    from inventory.localcloud.commands import LocalCloudError

    return one_sentence(mistakes=(LocalCloudError,))


@task(help={"yes": "add and replace keys without asking"})
def trust(c: Any, yes: bool = False) -> None:
    """Show the machines' host keys, remember those you accept."""
    with _one_sentence():
        from inventory.nodes import static_nodes
        from inventory.settings import SettingsError, load_settings

        settings = load_settings()
        if settings.provider != "static":
            raise SettingsError(
                "fab trust is for machines listed in cluster.toml; those of rented ones come with `fab up`, of "
                "local hosts with `fab local.up`"
            )
        nodes = static_nodes(settings)
        silent = [node.name for node in nodes if not _trust_node(node, yes)]
    if silent:
        raise Exit(f"not trusted: {', '.join(silent)}", code=1)


def _trust_node(node: Any, yes: bool) -> bool:
    """Bring known_hosts up to date for one machine; whether it is trusted now."""
    from inventory import hostkeys

    shown = hostkeys.ask(node.address, node.port)
    if not shown:
        _say(f"{node.name} ({node.address}:{node.port}) shows no host key: is it up, and its port {node.port} open?")
        return False
    text = hostkeys.read(node.known_hosts)
    change = hostkeys.compare(text, hostkeys.known_host_name(node.address, node.port), shown)
    if change.is_known:
        _say(f"{node.name}: known")
        return True
    for key in change.replaced:
        _say(f"{node.name}: was    {key.kind} {key.fingerprint}")
    for key in change.new:
        _say(f"{node.name}: shows  {key.kind} {key.fingerprint}")
    if not (yes or _asked(f"{node.name}: {'replace the old key' if change.replaced else 'trust it'}?")):
        return False
    hostkeys.write(node.known_hosts, hostkeys.updated(text, change))
    return True


def _asked(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Exit(f"{question} Compare the fingerprint with the provider's console, then: fab trust --yes", code=2)
    return agreed(question)


def _say(line: str) -> None:
    print(line, flush=True)


namespace = Collection(local, trust)
