"""What a node fetches from the internet, and whether it gets there. Pure: the looking is on_node/reach.py's."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from deploy.answers import NodeAnswer
from deploy.conda import installer_urls
from deploy.on_node.reach import ARCHIVES
from deploy.refusal import REFUSED
from inventory.node_program import argv
from inventory.settings import Settings
from training.hub_access import hub_at
from training.model_lock import LOCAL
from training.model_names import NamedModel

REACH = Path(__file__).parent / "on_node" / "reach.py"
MEND = "it needs a way to the internet; [mirrors] in cluster.toml takes other places, preset = china those in China"


def reach_command(name: str) -> str:
    """Shell that fails where none of the archives that a node's apt asks takes a connection."""
    look = shlex.join(argv(REACH, ARCHIVES))
    why = f"{name} reaches no package archive ($(echo $far)): {MEND}"
    return f'{{ far=$({look}) || {{ echo "{why}" >&2; exit {REFUSED}; }}; }}'


def far_command(places: Iterable[str]) -> str:
    """Shell that prints which of these places take no connection."""
    return f"{shlex.join(argv(REACH, *places))}; true"


def fetched_from(
    answer: NodeAnswer, environment: str, settings: Settings, models: Iterable[NamedModel], *, head: bool
) -> list[str]:
    """What a base deploy has still to ask from this node: packages on each, all else on the head. `environment`: the
    hash of the one that is wanted."""
    mirrors, new = settings.mirrors.resolved(), answer.environment != environment
    places = [ARCHIVES] if new else []
    if head and new:
        places += [mirrors.pypi] if mirrors.pypi else []
        if settings.python_provider == "conda":
            places += installer_urls(settings.python.distribution, mirrors.miniforge)[:1]
    missing = (model for model in models if not answer.models.get(model.folder))
    if head and any(not model.repo.startswith(LOCAL) for model in missing):
        places.append(hub_at(mirrors.hub, None, "").address)
    return places
