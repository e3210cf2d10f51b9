"""fab local.* and fab trust: hosts on this machine, and whose host keys are trusted."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from invoke import Collection, Exit, task

from inventory.command_line import one_sentence


def _one_sentence() -> AbstractContextManager[None]:
    from inventory.localcloud.commands import LocalCloudError

    return one_sentence(mistakes=(LocalCloudError,))


def _settings() -> Any:
    from inventory.settings import SettingsError, load_settings

    settings = load_settings()
    if settings.provider != "local":
        raise SettingsError(f'cluster.toml says provider = "{settings.provider}"; fab local.* needs "local"')
    return settings


@task(
    help={
        "nodes": "how many hosts; 0 means local.nodes in cluster.toml",
        "wheels": "download the Python packages for the hosts too (once)",
    }
)
def up(c: Any, nodes: int = 0, wheels: bool = True) -> None:
    """Boot hosts on this machine that look like freshly rented ones."""
    with _one_sentence():
        from inventory.localcloud import cloud
        from inventory.settings import SettingsError

        settings = _settings()
        if nodes < 0:
            raise SettingsError(f"--nodes {nodes}: a cluster has at least one host")
        cloud.up(settings, nodes or settings.local.nodes, _say)
        if wheels and settings.torch_flavour == "cpu":
            cloud.offer_wheels(settings, _wheelhouse())
    _say("next: pyinfra -y inventory/local.py deploy/base.py")


def _wheelhouse() -> Any:
    from pathlib import Path

    import deploy
    from deploy.requirements_lock import cpu_requirements
    from inventory.localcloud.image import PYTHON_VERSION
    from inventory.localcloud.wheelhouse import ensure_wheelhouse

    lock = Path(deploy.__file__).with_name("requirements.lock").read_text(encoding="utf-8")
    return ensure_wheelhouse(cpu_requirements(lock), PYTHON_VERSION, _say)


@task
def down(c: Any) -> None:
    """Remove the hosts, their disks and their network."""
    with _one_sentence():
        from inventory.localcloud import cloud

        cloud.down(_settings())
    _say("nothing is left")


@task
def status(c: Any) -> None:
    """Which hosts there are and whether they run."""
    with _one_sentence():
        from inventory.localcloud import cloud

        hosts = cloud.status(_settings())
    for row in hosts:
        _say(
            f"{row.host.name}  {row.state:8}  {row.host.address:15}  {row.host.hostname}  "
            f"disk {row.host.disk_serial} ({row.disk_used_gib:.1f} GiB used)"
        )
    if not hosts:
        _say("no hosts; boot them: fab local.up")


@task(help={"name": "host, for example te2"})
def cut(c: Any, name: str) -> None:
    """Pull a host's network cable; it goes on running."""
    with _one_sentence():
        from inventory.localcloud import cloud

        cloud.cut(_settings(), name)
    _say(f"{name} is cut off; plug it in again: fab local.heal {name}")


@task(help={"name": "host, for example te2"})
def heal(c: Any, name: str) -> None:
    """Plug a host's network cable in again."""
    with _one_sentence():
        from inventory.localcloud import cloud

        cloud.heal(_settings(), name)
    _say(f"{name} is on the network again")


@task(help={"yes": "add and replace keys without asking"})
def trust(c: Any, yes: bool = False) -> None:
    """Show the machines' host keys, remember those you accept."""
    with _one_sentence():
        from inventory.nodes import static_nodes
        from inventory.settings import SettingsError, load_settings

        settings = load_settings()
        if settings.provider != "static":
            raise SettingsError("fab trust is for machines listed in cluster.toml; local hosts are trusted already")
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
    return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}


def _say(line: str) -> None:
    print(line, flush=True)


local = Collection("local", up, down, status, cut, heal)
namespace = Collection(local, trust)
