"""fab local.*: the cloud on this machine, and what can happen to the machines rented from it."""

from __future__ import annotations

import os
from typing import Any

from invoke import Collection, task

from inventory.command_line import ask, say, sentences, yes_command
from inventory.localcloud.places import Places, cache_folder, cache_size_bytes
from training.text.counts import size_text
from training.text.deferred import deferred

with deferred():
    from inventory import settings as cluster_toml
    from inventory.localcloud import control, market, network, served, shape
    from inventory.localcloud import image as base_image
    from inventory.localcloud.ecs import catalogue, dispatch


def _settings() -> Any:
    """The settings, where they are for the cloud on this machine. Raises SettingsError."""
    settings = cluster_toml.load_settings()
    if not settings.on_this_machine:
        raise cluster_toml.SettingsError(
            "fab local.* are for the cloud on this machine, and cluster.toml names another: "
            'provider = "aliyun", and under [aliyun] endpoint = "local"'
        )
    return settings


def _places() -> Any:
    """The places of the cloud on this machine. Raises SettingsError."""
    return Places.of(_settings().name)


@task(help={"wheels": "also download the Python packages for the hosts (once)"})
def serve(c: Any, wheels: bool = True) -> None:
    """Start the local cloud: an ECS API that rents out hosts on this machine."""
    with sentences():
        settings = _settings()
        endpoint = served.serve(settings, say)
        if (image := settings.rental.image) in catalogue.FAMILIES[1:]:
            say(f"its machines get Debian 12 where image = {image!r}: it has no other system")
        if wheels and settings.torch_flavour == "cpu":
            wheels_folder = base_image.ensure_wheelhouse(c.spotune.cpu_requirements(), base_image.PYTHON_VERSION, say)
            served.show_wheels(Places.of(settings.name), wheels_folder)
    say(f"an emulated Alibaba Cloud ECS answers at {endpoint}; next: fab up")


@task(auto_shortflags=False, help={"yes": "do not ask for confirmation"})
def down(c: Any, yes: bool = False) -> None:
    """Remove the hosts, their disks, their network, snapshots and the ECS API."""
    with sentences():
        places = _places()
        if contents := served.what_is_there(places):
            ask(
                yes,
                f"remove {contents}, with all that lies there, runs not fetched too?",
                yes_command("local.down", down),
            )
        served.down(places)
        cached = cache_size_bytes()
    say("nothing is left")
    if cached:
        say(f"image and packages stay for the next one, {size_text(cached)} in {cache_folder()}")


@task
def status(c: Any) -> None:
    """Show whether the local cloud runs, and its machines."""
    with sentences():
        places = _places()
        endpoint = served.endpoint(places)
        say(f"the ECS API answers at {endpoint}" if endpoint else "the ECS API does not run: fab local.serve")
        for each in served.machines(places):
            name = served.short_name(places, each)
            cut = "  cut off" if network.is_cut(places.link(each.machine)) else ""
            limits = f"  {shape_text}" if (shape_text := str(shape.in_force(places, each.machine))) else ""
            say(f"{name}  {each.status:8}  {each.address:15}  {each.instance_id}  host {each.machine}{cut}{limits}")
        if shape_text := str(shape.for_later(places)):
            say(f"hosts that boot later: {shape_text}")


@task(help={"name": "host, for example te2"})
def cut(c: Any, name: str) -> None:
    """Disconnect a host's network; the host keeps running."""
    with sentences():
        served.cut(_places(), name)
    say(f"{name} is cut off; plug it in again: fab local.heal {name}")


@task(help={"name": "host, for example te2"})
def heal(c: Any, name: str) -> None:
    """Reconnect a host's network."""
    with sentences():
        served.heal(_places(), name)
    say(f"{name} is on the network again")


@task(
    name="shape",
    help={
        "mbit": "network bandwidth in Mbit/s, each way",
        "cpu": "CPU cores per host, for example 0.5",
        "hosts": "hosts, for example te1,te2; default: all, including those that boot later",
        "off": "remove all limits",
    },
)
def reshape(c: Any, mbit: str = "", cpu: str = "", hosts: str = "", off: bool = False) -> None:
    """Limit network and CPU of hosts; anything not given runs at full speed."""
    with sentences():
        cores = os.cpu_count() or 1
        wanted = shape.asked(mbit, cpu, off, cores)
        names = [name for each in hosts.split(",") if (name := each.strip())]
        if hosts and not names:
            raise shape.LocalCloudError(f"--hosts {hosts!r} names none; write them as te1,te2")
        places = _places()
        instances = served.reshape(places, names, wanted)
        together = sum(shape.in_force(places, each.machine).cpu or 0 for each in served.machines(places))
    whose = ", ".join(served.short_name(places, each) for each in instances) or "no host yet"
    say(f"{whose}{'' if names else ' and those that boot later'}: {str(wanted) or 'no limits'}")
    if together > cores:
        say(f"their quotas are {together:g} cores together and this machine has {cores}: they slow each other down")


@task(help={"name": "host, for example te2"})
def off(c: Any, name: str) -> None:
    """Power off a host."""
    with sentences():
        control.power_off(_places(), name)
    say(f"{name} is off; boot it again: fab local.on {name}")


@task(help={"name": "host, for example te2"})
def on(c: Any, name: str) -> None:
    """Boot a host that is powered off."""
    with sentences():
        control.power_on(_places(), name)
    say(f"{name} runs")


@task(help={"name": "host, for example te2", "notice": "seconds between notice and reclaim; 0: no notice"})
def reclaim(c: Any, name: str, notice: float = 300.0) -> None:
    """Reclaim a rented spot machine, as the market does."""
    with sentences():
        control.reclaim(_places(), name, notice)
    say(f"{name} goes in {notice:g} s of the cloud's clock; sooner: fab local.hurry {notice:g}" if notice else "gone")


@task(help={"seconds": "seconds to advance"})
def hurry(c: Any, seconds: str) -> None:
    """Advance the local cloud's clock."""
    with sentences():
        if not seconds.isdecimal():
            raise cluster_toml.SettingsError(f"SECONDS needs a whole number, not {seconds!r}")
        ahead = control.hurry(_places(), float(seconds))
    say(f"the cloud's clock is {ahead:g} s ahead")


@task(
    help={
        "action": "API call that fails, for example RunInstances; any: every call",
        "kind": "kind of failure (an unknown kind lists them all); none: clear all failures",
        "times": "number of failures; 0: until cleared",
        "skip": "calls to let pass first",
        "zone": "only in this zone",
        "instance_type": "only for this instance type",
    }
)
def fault(
    c: Any, action: str, kind: str, times: int = 1, skip: int = 0, zone: str = "", instance_type: str = ""
) -> None:
    """Make calls to the local cloud fail."""
    with sentences():
        places = _places()
        served.running(places)
        plan = dispatch.FaultFile(places.folder / "faults.json")
        if kind == "none":
            plan.clear()
        else:
            plan.add(dispatch.Fault("*" if action == "any" else action, kind, times, skip, zone, instance_type))
    say("no call goes wrong any more" if kind == "none" else f"{action}: {kind}")


@task(
    name="market",
    help={
        "minutes": "how long it trades, by the cloud's clock",
        "every": "mean seconds between two machines that it takes back",
        "notice": "seconds of notice",
        "silent": "percent that get no notice",
        "heads": "percent that are te1",
        "seed": "the same number takes the same machines",
    },
)
def spot_market(
    c: Any,
    minutes: float = 30.0,
    every: float = 90.0,
    notice: float = 60.0,
    silent: float = 25.0,
    heads: float = 10.0,
    seed: int = 0,
) -> None:
    """Reclaim machines at random, as a spot market would, for some time."""
    with sentences("the market is closed"):
        traded = market.SpotMarket(seed, every, notice, silent / 100, heads / 100)
        taken = market.trade(_places(), traded, 60 * minutes, say)
    say(f"the market is closed; it took {taken} machines back")


local = Collection("local", serve, down, status, cut, heal, reshape, off, on, reclaim, hurry, fault, spot_market)
