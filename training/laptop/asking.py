"""Asking a head: the code in on_head/ is sent once a connection, then each question is a line, and so is its answer."""

from __future__ import annotations

import base64
import json
import os
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from inventory.node_program import Program, ProgramError
from training.run.launch import LaunchError
from training.text.files import bounded_json
from training.text.problems import FAILED

P = ParamSpec("P")
T = TypeVar("T")
ON_HEAD = Path(__file__).parent / "on_head"
PACKAGE = f"{__package__}.{ON_HEAD.name}"
BOOT = f"""import base64, json, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(sys.stdin.readline()))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(text, vars(module))
sys.modules["{PACKAGE}.serve"].serve()
"""
ARGV = ("python3", "-I", "-c", BOOT)
LONGEST = 64 << 20
"""Characters of an answer."""


class HeadError(LaunchError):
    """The head cannot be reached, or what it was asked for could not be done there."""

    exit_code = FAILED


class VerbError(HeadError):
    """It could not be done there; the head still answers."""


@cache
def code() -> str:
    """The first line that is sent: the modules in the order in which they import each other. What this program began
    with, also after an update of its files."""
    modules = [
        (PACKAGE, ""),
        *((f"{PACKAGE}.{name}", _source(name)) for name in ("fs", "machines", "run_folders", "serve")),
    ]
    return base64.b64encode(zlib.compress(json.dumps(modules).encode(), 9)).decode()


def _source(name: str) -> str:
    return (ON_HEAD / f"{name}.py").read_text(encoding="utf-8")


class Questions:
    """A conversation with a head. Who asks holds `free`: the next question comes after the answer."""

    def __init__(self, program: Program) -> None:
        self._program, self._messages, self.free = program, program.messages(), threading.Lock()
        program.send(code())

    def ask(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a verb of on_head answers there. Raises VerbError, and ProgramError where the talk is over."""
        plain = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in arguments]
        self._program.send({"verb": verb.__name__, "arguments": plain, "named": named})
        try:
            content = bounded_json(self._read())
        except ValueError as error:
            raise ProgramError(
                f"{self._program.where}: its answer to {verb.__name__} cannot be read: {error}"
            ) from error
        if isinstance(content, dict) and "error" in content:
            raise VerbError(f"{self._program.where}: {content['error']}")
        answer: Any = content.get("answer") if isinstance(content, dict) else None
        if not fits(answer, get_type_hints(verb)["return"]):
            raise ProgramError(f"{self._program.where}: its answer to {verb.__name__} is of another kind")
        return cast("T", answer)

    def _read(self) -> str:
        pieces, length = list[str](), 0
        for message in self._messages:
            pieces.append(str(message.get("piece")))
            length += len(pieces[-1])
            if length > LONGEST:
                raise ProgramError(f"{self._program.where}: an answer has more than {LONGEST} characters")
            if not message.get("more"):
                return "".join(pieces)
        raise ProgramError(f"{self._program.where}: the program ended without an answer")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is what an annotation says."""
    inner = get_args(hint)
    if is_typeddict(hint):
        kinds = get_type_hints(hint)
        return (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(fits(value[key], kinds[key]) for key in kinds)
        )
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, kind) for kind in inner)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is (NoneType if hint is None else hint)
