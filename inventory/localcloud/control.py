"""Driving a served cloud from this machine: calls over the socket in its folder, which need no signature."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from inventory.localcloud import host, served
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import CONTROL, ECS
from inventory.localcloud.places import Places, control_socket

TIMEOUT_S = 60


def call(places: Places, action: str, version: str = CONTROL, **parameters: str) -> dict[str, Any]:
    """The answer to a call. Raises LocalCloudError with the API's own words."""
    served.running(places)
    try:
        with control_socket(places.folder) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            connection.sendall(f"{json.dumps([version, action, parameters])}\n".encode())
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
    except (OSError, ValueError) as error:
        raise LocalCloudError(f"{action}: the ECS API does not answer: {error}") from None
    if "Refusal" in answer:
        raise LocalCloudError(f"{action}: {answer['Refusal']}")
    return answer


def hurry(places: Places, seconds: float) -> float:
    """Put the cloud's clock forward; how far it is ahead in all, in seconds."""
    return float(call(places, "Hurry", Seconds=str(seconds))["OffsetSeconds"])


def reclaim(places: Places, name: str, notice_s: float) -> None:
    """Take a spot machine back after a notice; without one, returns when it is gone."""
    instance = served.find(places, name)
    call(places, "Reclaim", InstanceId=instance.instance_id, NoticeSeconds=str(notice_s))
    if notice_s == 0:
        _passed(places, instance, "Running", "Stopping")


def power_off(places: Places, name: str) -> None:
    """Stop a machine; returns when it is off."""
    _change(places, name, "StopInstances", "Stopped")


def power_on(places: Places, name: str) -> None:
    """Boot a machine that is off; returns when it runs. Raises LocalCloudError with its last words."""
    _change(places, name, "StartInstances", "Running")


def _change(places: Places, name: str, action: str, until: str) -> None:
    instance = served.find(places, name)
    call(places, action, ECS, InstanceId=instance.instance_id)
    status = _passed(places, instance, "Starting", "Stopping")
    if status != until:
        raise LocalCloudError(f"{name} is {status or 'gone'}{host.last_words(places, instance.machine)}")


def _passed(places: Places, machine: EmulatedInstance, *passing: str) -> str:
    """The machine's status once it is none of those that pass; empty: it is gone."""
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while (status := _status(places, machine.instance_id)) in passing:
        if time.monotonic() > deadline:
            raise LocalCloudError(f"{machine.name} is still {status} after {2 * TIMEOUT_S} s")
        time.sleep(0.2)
    return status


def _status(places: Places, instance_id: str) -> str:
    return next((each.status for each in served.machines(places) if each.instance_id == instance_id), "")
