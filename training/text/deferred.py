"""Imports at the top of a file that cost nothing until they are used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_NAMES = set[str]()


class _Deferring:
    """Finds modules as usual, but they run only when an attribute of theirs is first used."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or spec.submodule_search_locations is not None:
            return spec
        spec.loader = LazyLoader(spec.loader)
        _NAMES.add(name)
        return spec


@contextmanager
def deferred() -> Iterator[None]:
    """Modules imported inside the `with` run when they are first used, so that `fab --list` need not load what the
    tasks stand on. Import modules there (`from package import module`), not their names, which would run them. Python
    3.11 does not stand that two threads use one first at the same time: whoever starts a thread that uses them calls
    `load` before."""
    finder = _Deferring()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def load() -> None:
    """Run all deferred modules now."""
    while _NAMES:  # they defer others
        if module := sys.modules.get(_NAMES.pop()):
            module.__doc__  # noqa: B018 - the first use of any attribute runs it
