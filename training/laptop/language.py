"""The language of who sits at the terminal, in which pages are written."""

from __future__ import annotations

import os
from collections.abc import Mapping

from inventory.settings import Settings, SettingsError, load_settings

LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides, as in POSIX."""


def language_of(environ: Mapping[str, str], said: str = "") -> str:
    """`en` or `zh`: as cluster.toml has `said`, else the terminal's."""
    locale = next((environ[name] for name in LOCALE if environ.get(name)), "")
    return said or ("zh" if locale.lower().startswith("zh") else "en")


def language_here(settings: Settings | None = None) -> str:
    """As cluster.toml says, whose `settings` they are, else which is read; the terminal's where it cannot be."""
    try:
        said = (settings or load_settings()).language
    except SettingsError:
        said = ""
    return language_of(os.environ, said)
