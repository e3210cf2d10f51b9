"""Which adapter stands behind the port, by the provider that cluster.toml names. Vendors' modules are imported here,
when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from inventory.cloud.port import Cloud
from inventory.settings import Settings


def open_cloud(settings: Settings, record: Path | None = None) -> Cloud:
    """The cluster's region. `record`: a folder for scrubbed answers.

    Raises RentError with what is missing (a package, credentials, the local cloud), SettingsError where the machines
    are not rented.
    """
    return OPENED_BY[settings.rental.table](settings, record)


def _aliyun(settings: Settings, record: Path | None) -> Cloud:
    from inventory.aliyun_ecs.client import Ecs  # slow; threads ask for it at once, so it is not deferred

    return Ecs.open(settings, record)


OPENED_BY: Mapping[str, Callable[[Settings, Path | None], Cloud]] = {"aliyun": _aliyun}
