"""The language of who sits at the terminal, in which pages are written."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from inventory.settings import Settings, SettingsError, load_settings, settings_path

LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides, as in POSIX."""


def language_of(environ: Mapping[str, str], said: str = "") -> str:
    """`en` or `zh`: as cluster.toml has `said`, else the terminal's."""
    locale = next((environ[name] for name in LOCALE if environ.get(name)), "")
    return said or ("zh" if locale.lower().startswith("zh") else "en")


def language_here(settings: Settings | None = None) -> str:
    """As cluster.toml says, whose `settings` they are, else which is read; the terminal's where it cannot be, and where
    it is there that is said."""
    try:
        said = (settings or load_settings()).language
    except SettingsError as error:
        if settings_path().exists():
            print(f"{error}\npages are in the terminal's language: the file cannot be read", file=sys.stderr)
        said = ""
    return language_of(os.environ, said)
