"""fab local.*: hosts on this machine, booted by hand or rented through the local cloud's ECS API."""

from __future__ import annotations

from typing import Any

from invoke import Collection, task

from inventory.command_line import say, sentences

TO_RENT = """\
in cluster.toml:

  provider = "aliyun"
  [aliyun]
  endpoint = "local"
  region = "{region}"
  types = ["ecs.local.small"]       # 1 vCPU, 2 GiB; or ecs.local.medium
  image = "acs:debian_12_x64"
  data_disk_gib = 20                # sparse: takes what is written

next: fab up"""


def _settings(provider: str = "") -> Any:
    """The settings, where they are for hosts on this machine. Raises SettingsError."""
    from inventory.settings import SettingsError, load_settings

    settings = load_settings()
    if provider and settings.provider != provider:
        raise SettingsError(f'cluster.toml says provider = "{settings.provider}"; this needs "{provider}"')
    if not settings.on_this_machine:
        raise SettingsError(
            f'cluster.toml says provider = "{settings.provider}"; fab local.* needs "local", '
            'or "aliyun" with endpoint = "local"'
        )
    return settings


def _rented() -> Any:
    """(settings, places) where this cloud's machines are rented ones; (settings, None) where they are not."""
    from inventory.localcloud.places import Places
    from inventory.localcloud.served import is_served

    settings = _settings()
    places = Places.of(settings.name)
    return settings, places if is_served(places) else None


def _served() -> Any:
    """The places of a cloud that is served. Raises SettingsError."""
    from inventory.settings import SettingsError

    settings, places = _rented()
    if places is None:
        raise SettingsError(f"the cloud {settings.name!r} has no ECS API; start it: fab local.serve")
    return places


@task(
    help={
        "nodes": "how many hosts; 0 means local.nodes in cluster.toml",
        "wheels": "download the Python packages for the hosts too (once)",
    }
)
def up(c: Any, nodes: int = 0, wheels: bool = True) -> None:
    """Boot hosts on this machine that look like freshly rented ones."""
    with sentences():
        from inventory.localcloud import cloud
        from inventory.settings import SettingsError

        settings = _settings("local")
        if nodes < 0:
            raise SettingsError(f"--nodes {nodes}: a cluster has at least one host")
        cloud.up(settings, nodes or settings.local.nodes, say)
        if wheels and settings.torch_flavour == "cpu":
            cloud.offer_wheels(settings, _wheelhouse())
    say("next: pyinfra -y inventory/local.py deploy/base.py")


def _wheelhouse() -> Any:
    from pathlib import Path

    import deploy
    from deploy.requirements_lock import cpu_requirements
    from inventory.localcloud.image import PYTHON_VERSION
    from inventory.localcloud.wheelhouse import ensure_wheelhouse

    lock = Path(deploy.__file__).with_name("requirements.lock").read_text(encoding="utf-8")
    return ensure_wheelhouse(cpu_requirements(lock), PYTHON_VERSION, say)


@task(help={"wheels": "download the Python packages for the hosts too (once)"})
def serve(c: Any, wheels: bool = True) -> None:
    """Serve an ECS API on this machine, over hosts of its own."""
    with sentences():
        from inventory.localcloud import served
        from inventory.localcloud.places import Places

        settings = _settings()
        endpoint = served.serve(settings, say)
        if wheels and settings.torch_flavour == "cpu":
            served.show_wheels(Places.of(settings.name), _wheelhouse())
    say(f"an emulated Alibaba Cloud ECS answers at {endpoint}; {TO_RENT.format(region=settings.aliyun.region)}")


@task
def down(c: Any) -> None:
    """Remove the hosts, their disks, their network, snapshots and the ECS API."""
    with sentences():
        from inventory.localcloud import cloud

        cloud.down(_settings())
    say("nothing is left")


@task
def status(c: Any) -> None:
    """Which hosts there are and whether they run."""
    with sentences():
        settings, places = _rented()
        lines = _status_of_rented(places) if places else _status_of_hosts(settings)
    for line in lines:
        say(line)


def _status_of_hosts(settings: Any) -> list[str]:
    from inventory.localcloud import cloud

    return [
        f"{row.host.name}  {row.state:8}  {row.host.address:15}  {row.host.hostname}  "
        f"disk {row.host.disk_serial} ({row.disk_used_gib:.1f} GiB used)"
        for row in cloud.status(settings)
    ] or [f"no hosts; boot them: {'fab local.serve, then fab up' if settings.is_rented else 'fab local.up'}"]


def _status_of_rented(places: Any) -> list[str]:
    from inventory.localcloud import served

    endpoint = served.endpoint(places)
    lines = [f"the ECS API answers at {endpoint}" if endpoint else "the ECS API does not run: fab local.serve"]
    for row in served.machines(places):
        cut = "  cut off" if row.is_cut else ""
        lines.append(f"{row.name}  {row.status:8}  {row.address:15}  {row.instance_id}  host {row.machine}{cut}")
    return lines


@task(help={"name": "host, for example te2"})
def cut(c: Any, name: str) -> None:
    """Pull a host's network cable; it goes on running."""
    with sentences():
        from inventory.localcloud import cloud, served

        settings, places = _rented()
        served.cut(places, name) if places else cloud.cut(settings, name)
    say(f"{name} is cut off; plug it in again: fab local.heal {name}")


@task(help={"name": "host, for example te2"})
def heal(c: Any, name: str) -> None:
    """Plug a host's network cable in again."""
    with sentences():
        from inventory.localcloud import cloud, served

        settings, places = _rented()
        served.heal(places, name) if places else cloud.heal(settings, name)
    say(f"{name} is on the network again")


@task(help={"name": "host, for example te2"})
def off(c: Any, name: str) -> None:
    """Take a host's power away."""
    with sentences():
        from inventory.localcloud import cloud, control

        settings, places = _rented()
        control.power_off(places, name) if places else cloud.power_off(settings, name)
    say(f"{name} is off; boot it again: fab local.on {name}")


@task(help={"name": "host, for example te2"})
def on(c: Any, name: str) -> None:
    """Boot a host that is off."""
    with sentences():
        from inventory.localcloud import cloud, control

        settings, places = _rented()
        control.power_on(places, name) if places else cloud.power_on(settings, name, say)
    say(f"{name} runs")


@task(help={"name": "rented machine, for example te2", "notice": "seconds between the notice and the end; 0: none"})
def reclaim(c: Any, name: str, notice: float = 300.0) -> None:
    """Take a rented spot machine back, as the market does."""
    with sentences():
        from inventory.localcloud import control

        control.reclaim(_served(), name, notice)
    say(f"{name} goes in {notice:g} s of the cloud's clock; sooner: fab local.hurry {notice:g}" if notice else "gone")


@task(help={"seconds": "how far"})
def hurry(c: Any, seconds: str) -> None:
    """Put the clock of the served cloud forward."""
    with sentences():
        from inventory.localcloud import control
        from inventory.settings import SettingsError

        if not seconds.isdecimal():
            raise SettingsError(f"SECONDS needs a whole number, not {seconds!r}")
        ahead = control.hurry(_served(), float(seconds))
    say(f"the cloud's clock is {ahead:g} s ahead")


@task(
    help={
        "action": "call to strike, for example RunInstances; any for every one",
        "kind": "what goes wrong (a wrong kind lists them all); none: forget all that was asked for",
        "times": "how often; 0: until forgotten",
        "skip": "calls to let pass first",
        "zone": "only there",
        "instance_type": "only of this type",
    }
)
def fault(
    c: Any, action: str, kind: str, times: int = 1, skip: int = 0, zone: str = "", instance_type: str = ""
) -> None:
    """Let calls of the served cloud go wrong."""
    with sentences():
        from inventory.localcloud.ecs.faults import Fault, FaultFile

        plan = FaultFile(_served().folder / "faults.json")
        if kind == "none":
            plan.clear()
        else:
            plan.add(Fault("*" if action == "any" else action, kind, times, skip, zone, instance_type))
    say("no call goes wrong any more" if kind == "none" else f"{action}: {kind}")


local = Collection("local", up, serve, down, status, cut, heal, off, on, reclaim, hurry, fault)
