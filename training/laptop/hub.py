"""The model hub as this machine reads it."""

from __future__ import annotations

import os
import shlex

from inventory.settings import SettingsError, load_settings
from training.models.hub import Hub, hub_at, hub_of

ADDRESS = "HF_ENDPOINT"
"""Environment variable of the hub's own client."""


def hub_address() -> str:
    """HF_ENDPOINT's; without it that of [mirrors] in cluster.toml; empty: the Hub itself. Raises SettingsError."""
    return os.environ.get(ADDRESS) or load_settings().mirrors.resolved().hub


def mirror() -> str:
    """The same, for a command that is shown: without readable settings the Hub itself."""
    try:
        return hub_address()
    except SettingsError:
        return ""


def download_command(arguments: str, address: str) -> str:
    """What fetches a model by hand, from the hub at `address` where that is not the Hub itself."""
    return f"{ADDRESS}={shlex.quote(address)} hf download {arguments}" if address else f"hf download {arguments}"


def hub_to_read() -> Hub:
    """The hub there, with this machine's token where that is meant for it. Raises HubError and SettingsError."""
    from huggingface_hub import get_token

    return hub_of(os.environ | {ADDRESS: hub_address()}, get_token())


def another() -> str:
    """How another hub is named, where this one does not answer."""
    named = hub_at(hub_address(), None, "").another
    return f"{ADDRESS} names it; without that {named}" if os.environ.get(ADDRESS) else named
