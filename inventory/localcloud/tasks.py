"""fab local.*: the cloud on this machine, and what can happen to the machines rented from it."""

from __future__ import annotations

import os
from typing import Any

from invoke import Collection, task

from inventory.command_line import ask, say, sentences, yes_command


def _settings() -> Any:
    """The settings, where they are for the cloud on this machine. Raises SettingsError."""
    from inventory.settings import SettingsError, load_settings

    settings = load_settings()
    if not settings.on_this_machine:
        raise SettingsError(
            "fab local.* are for the cloud on this machine, and cluster.toml names another: "
            'provider = "aliyun", and under [aliyun] endpoint = "local"'
        )
    return settings


def _places() -> Any:
    """The places of the cloud on this machine. Raises SettingsError."""
    from inventory.localcloud.places import Places

    return Places.of(_settings().name)


def _wheelhouse() -> Any:
    from pathlib import Path

    import deploy
    from deploy.environment import cpu_requirements
    from inventory.localcloud.image import PYTHON_VERSION
    from inventory.localcloud.wheelhouse import ensure_wheelhouse

    lock = Path(deploy.__file__).with_name("requirements.lock").read_text(encoding="utf-8")
    return ensure_wheelhouse(cpu_requirements(lock), PYTHON_VERSION, say)


@task(help={"wheels": "download the Python packages for the hosts too (once)"})
def serve(c: Any, wheels: bool = True) -> None:
    """Start the cloud on this machine: an ECS API that rents out real hosts."""
    with sentences():
        from inventory.localcloud import served
        from inventory.localcloud.ecs.catalogue import FAMILIES
        from inventory.localcloud.places import Places

        settings = _settings()
        endpoint = served.serve(settings, say)
        if (image := settings.rental.image) in FAMILIES[1:]:
            say(f"its machines get Debian 12 where image = {image!r}: it has no other system")
        if wheels and settings.torch_flavour == "cpu":
            served.show_wheels(Places.of(settings.name), _wheelhouse())
    say(f"an emulated Alibaba Cloud ECS answers at {endpoint}; next: fab up")


@task(auto_shortflags=False, help={"yes": "remove machines, disks and snapshots without asking"})
def down(c: Any, yes: bool = False) -> None:
    """Remove the hosts, their disks, their network, snapshots and the ECS API."""
    with sentences():
        from inventory.localcloud import served
        from inventory.localcloud.places import cache_folder, cache_size_bytes
        from training.counting import size_text

        places = _places()
        if there := served.what_is_there(places):
            ask(
                yes,
                f"remove {there}, with all that lies there, runs not fetched too?",
                yes_command("local.down", down),
            )
        served.down(places)
        cached = cache_size_bytes()
    say("nothing is left")
    if cached:
        say(f"image and packages stay for the next one, {size_text(cached)} in {cache_folder()}")


@task
def status(c: Any) -> None:
    """Whether the cloud on this machine runs, and its machines."""
    with sentences():
        from inventory.localcloud import network, served, shape

        places = _places()
        endpoint = served.endpoint(places)
        say(f"the ECS API answers at {endpoint}" if endpoint else "the ECS API does not run: fab local.serve")
        for each in served.machines(places):
            name = served.short_name(places, each)
            cut = "  cut off" if network.is_cut(places.link(each.machine)) else ""
            limits = f"  {told}" if (told := str(shape.in_force(places, each.machine))) else ""
            say(f"{name}  {each.status:8}  {each.address:15}  {each.instance_id}  host {each.machine}{cut}{limits}")
        if told := str(shape.for_later(places)):
            say(f"hosts that boot later: {told}")


@task(help={"name": "host, for example te2"})
def cut(c: Any, name: str) -> None:
    """Pull a host's network cable; it goes on running."""
    with sentences():
        from inventory.localcloud import served

        served.cut(_places(), name)
    say(f"{name} is cut off; plug it in again: fab local.heal {name}")


@task(help={"name": "host, for example te2"})
def heal(c: Any, name: str) -> None:
    """Plug a host's network cable in again."""
    with sentences():
        from inventory.localcloud import served

        served.heal(_places(), name)
    say(f"{name} is on the network again")


@task(
    name="shape",
    help={
        "mbit": "Mbit/s of the cable, each way",
        "cpu": "cores of this machine, for example 0.5; the hosts' together should not be more than it has",
        "hosts": "for example te1,te2; without: all, and those that boot later",
        "off": "no limits any more",
    },
)
def reshape(c: Any, mbit: str = "", cpu: str = "", hosts: str = "", off: bool = False) -> None:
    """Slow hosts' network links and CPUs; what is not named is at full speed."""
    with sentences():
        from inventory.localcloud import served, shape

        cores = os.cpu_count() or 1
        wanted = shape.asked(mbit, cpu, off, cores)
        names = [name for each in hosts.split(",") if (name := each.strip())]
        if hosts and not names:
            raise shape.LocalCloudError(f"--hosts {hosts!r} names none; write them as te1,te2")
        places = _places()
        found = served.reshape(places, names, wanted)
        together = sum(shape.in_force(places, each.machine).cpu or 0 for each in served.machines(places))
    whose = ", ".join(served.short_name(places, each) for each in found) or "no host yet"
    say(f"{whose}{'' if names else ' and those that boot later'}: {str(wanted) or 'no limits'}")
    if together > cores:
        say(f"their quotas are {together:g} cores together and this machine has {cores}: they slow each other down")


@task(help={"name": "host, for example te2"})
def off(c: Any, name: str) -> None:
    """Take a host's power away."""
    with sentences():
        from inventory.localcloud import control

        control.power_off(_places(), name)
    say(f"{name} is off; boot it again: fab local.on {name}")


@task(help={"name": "host, for example te2"})
def on(c: Any, name: str) -> None:
    """Boot a host that is off."""
    with sentences():
        from inventory.localcloud import control

        control.power_on(_places(), name)
    say(f"{name} runs")


@task(help={"name": "host, for example te2", "notice": "seconds between the notice and the end; 0: none"})
def reclaim(c: Any, name: str, notice: float = 300.0) -> None:
    """Take a rented spot machine back, as the market does."""
    with sentences():
        from inventory.localcloud import control

        control.reclaim(_places(), name, notice)
    say(f"{name} goes in {notice:g} s of the cloud's clock; sooner: fab local.hurry {notice:g}" if notice else "gone")


@task(help={"seconds": "how far"})
def hurry(c: Any, seconds: str) -> None:
    """Put the clock of the served cloud forward."""
    with sentences():
        from inventory.localcloud import control
        from inventory.settings import SettingsError

        if not seconds.isdecimal():
            raise SettingsError(f"SECONDS needs a whole number, not {seconds!r}")
        ahead = control.hurry(_places(), float(seconds))
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
        from inventory.localcloud import served
        from inventory.localcloud.ecs.faults import Fault, FaultFile

        places = _places()
        served.running(places)
        plan = FaultFile(places.folder / "faults.json")
        if kind == "none":
            plan.clear()
        else:
            plan.add(Fault("*" if action == "any" else action, kind, times, skip, zone, instance_type))
    say("no call goes wrong any more" if kind == "none" else f"{action}: {kind}")


local = Collection("local", serve, down, status, cut, heal, reshape, off, on, reclaim, hurry, fault)
