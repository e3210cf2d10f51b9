"""Driving a served cloud: signed calls of the API's own and of those that only the emulator has."""

from __future__ import annotations

import configparser
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from inventory.localcloud import served
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs.calls import ECS
from inventory.localcloud.ecs.keys import CREDENTIALS
from inventory.localcloud.ecs.signature import signed_headers
from inventory.localcloud.places import Places

TIMEOUT_S = 60
CONTROL = "local"


def call(places: Places, action: str, version: str = CONTROL, **parameters: str) -> dict[str, Any]:
    """The answer to a call. Raises LocalCloudError with the API's own words."""
    endpoint = served.endpoint(places)
    if not endpoint:
        raise LocalCloudError(f"the ECS API of the cloud {places.cloud!r} does not run; start it: fab local.serve")
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(places.folder / CREDENTIALS, encoding="utf-8")
    key = (ini["default"]["access_key_id"], ini["default"]["access_key_secret"])
    headers = signed_headers(
        host=endpoint,
        action=action,
        version=version,
        query=parameters,
        key=key,
        now=time.time(),
        nonce=secrets.token_hex(16),
    )
    url = f"http://{endpoint}/?{urllib.parse.urlencode(parameters, quote_via=urllib.parse.quote)}"
    request = urllib.request.Request(url, method="POST", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        told = json.load(error)
        raise LocalCloudError(f"{action}: {told['Code']}: {told['Message']}") from None
    except OSError as error:
        raise LocalCloudError(f"{action}: the ECS API does not answer: {error}") from None


def hurry(places: Places, seconds: float) -> float:
    """Put the cloud's clock forward; how far it is ahead in all, in seconds."""
    return float(call(places, "Hurry", Seconds=str(seconds))["OffsetSeconds"])


def reclaim(places: Places, name: str, notice_s: float) -> None:
    """Take a spot machine back after a notice."""
    found = served.find(places, name)
    call(places, "Reclaim", InstanceId=found.instance_id, NoticeSeconds=str(notice_s))


def power_off(places: Places, name: str) -> None:
    """Stop a machine; returns when it is off."""
    _change(places, name, "StopInstance", "Stopped")


def power_on(places: Places, name: str) -> None:
    """Boot a machine that is off; returns when it runs."""
    _change(places, name, "StartInstance", "Running")


def _change(places: Places, name: str, action: str, until: str) -> None:
    found = served.find(places, name)
    call(places, action, ECS, InstanceId=found.instance_id)
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while served.find(places, found.instance_id).status != until:
        if time.monotonic() > deadline:
            raise LocalCloudError(f"{found.name} is not {until} after {2 * TIMEOUT_S} s")
        time.sleep(0.2)
