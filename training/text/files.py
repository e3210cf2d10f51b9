"""What another machine wrote or answered, read with limits, also of time: JSON, numbers, a shell's answer, SHA256SUMS.

Standard library only: it is shipped to bare nodes too."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")
MOST = 1e30
"""Numbers in a JSON text are below this, which is far above any count of ours."""
FIGURES = (-1e10, 1e11)
"""Between these is a figure of a run, as a time, a step or a price; as seconds since 1970 the years 1653 and 5138."""
DEEPEST, LONGEST = 64, 256 << 20
"""Lists and objects within each other; characters of a text."""


def bounded_json(text: str, constant: Callable[[str], Any] = lambda _: None) -> Any:
    """The value of a JSON text, with what `constant` makes of NaN and Infinity: null. Raises ValueError where it is
    none, too long, nested too deeply, or has a number that is not below MOST."""
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters, more than {LONGEST}")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=constant)
        deep = text.count("{") + text.count("[") > DEEPEST and _depth(value) > DEEPEST
    except RecursionError:
        deep = True
    if deep:
        raise ValueError("it is nested too deeply")
    return value


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def object_in(path: Path, parse: Callable[[str], Any] = bounded_json) -> dict[str, Any]:
    """The object in a file; nothing where there is none, or half of one."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_figure(value: Any) -> bool:
    """Whether it is a finite number of a size that a run can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and FIGURES[0] < value < FIGURES[1]


def token_ids(*eos_token_ids: Any) -> tuple[int, ...]:
    """The token ids that configurations give as one number, as a list, or not at all. All else is left out."""
    each = [one for some in eos_token_ids for one in (some if isinstance(some, list) else [some])]
    return tuple(one for one in each if type(one) is int and 0 <= one < 1 << 32)


def figure_in(text: str) -> float:
    """The figure that a text is, as 1700000000.5; 0 where it is none."""
    return float(text) if re.fullmatch(r"[0-9]{1,11}(\.[0-9]{1,20})?", text.strip()) else 0.0


def _whole(text: str) -> int:
    if len(text) > 19 or abs(int(text)) >= MOST:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _finite(text: str) -> float:
    if abs(value := float(text)) >= MOST:
        raise ValueError(f"{text:.30} is too large")
    return value


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, or TimeoutError; a worker that never answers is left behind."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome[0]


SHELL_ADVICE = "let it print for terminals only, as in [ -t 1 ] && echo ... in its .bashrc"
SFTP_GARBAGE = f"the node's shell prints something before its sftp server speaks; {SHELL_ADVICE}"


@dataclass(frozen=True)
class Frame:
    """The two lines around one call's output."""

    mark: str = field(default_factory=lambda: f"spotune-{secrets.token_hex(8)}")

    @property
    def opening(self) -> str:
        """Shell that draws the line, on a line of its own whatever was printed before."""
        return f"printf '\\n%s\\n' {self.mark}; "

    def around(self, command: str) -> str:
        """The command between two lines; its exit code stays."""
        return f"{self.opening}(\n{command}\n); set -- $?; {self.opening}exit $1"

    def split(self, output: str) -> tuple[str | None, str]:
        """(what the command printed, the first line that the shell printed itself); None where no command ran."""
        greeting, opened, rest = f"\n{output}".partition(f"\n{self.mark}\n")
        if not opened:
            return None, _first_line(greeting)
        answer, closed, farewell = rest.rpartition(f"\n{self.mark}\n")
        return (answer, _first_line(greeting + farewell)) if closed else (rest, _first_line(greeting))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


SUMS = "SHA256SUMS"
ORIGIN = "spotune-model.json"
"""Beside a model's files: where they came from, and the sha256 of their SHA256SUMS."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""As PEFT calls them."""
ADAPTER = (f"adapter/{ADAPTER_WEIGHTS}", f"adapter/{ADAPTER_CONFIG}")
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
PARTS = (*ADAPTER, OPTIMIZER, STATE)
"""What a checkpoint of an adapter consists of."""
MODEL_CONFIG = "model/config.json"
"""With weights beside it, what full fine-tuning has in the adapter's place."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "tekken.json"),
    *("*.model", "*.tiktoken", *TEMPLATES),
)
"""Files that a tokenizer may consist of."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LICENCE = ("LICENSE*", "NOTICE*")
"""What goes wherever a model goes, and is no part of it."""
GENERATION = "generation_config.json"
SMALL = ("config.json", GENERATION, "*processor_config.json", *TOKENIZER)
MODEL = ("*.safetensors", INDEX, *SMALL)
"""Files that a model consists of: weights, configuration, tokenizer, templates. What else lies in its folder changes
nothing that is computed, and so not its hash."""
BEST = "best"
"""File among the checkpoints: the name of the one with the lowest validation loss."""


def missing_parts(names: Collection[str]) -> list[str]:
    """What a checkpoint of these files lacks: an adapter or a whole model, the optimizer's state, where it stood."""
    model = any(name.startswith("model/") and name.endswith(".safetensors") for name in names)
    learned = (MODEL_CONFIG,) if model else ADAPTER
    return [name for name in (*learned, OPTIMIZER, STATE) if name not in names]


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_one_of(name: str, patterns: Iterable[str] = MODEL) -> bool:
    """Whether one of the patterns means a file of this path inside a folder; `*` ends at a slash. None means what is
    hidden (._config.json of another system), a copy that a file manager left ("model (1).safetensors"), or the weights
    once more as Mistral's own programs read them (consolidated.safetensors)."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    copied = {" ", "("} & set(name) and name.endswith((".safetensors", ".json", ".model"))
    matches = (name.count("/") == one.count("/") and fnmatchcase(name, one) for one in patterns)
    return not (hidden or copied or name.startswith("consolidated")) and any(matches)


def model_files(folder: Path, patterns: Iterable[str] = MODEL) -> list[str]:
    """Which of a folder's files these are, by relative path, sorted."""
    paths = {path.relative_to(folder).as_posix() for one in patterns for path in folder.glob(one) if path.is_file()}
    return sorted(name for name in paths if is_one_of(name, patterns))


def copy_files(
    folder: Path, to: Path, patterns: Iterable[str], put: Callable[[Path, Path], object] = shutil.copyfile
) -> None:
    """Put these files of a folder into another one, at the same relative paths."""
    for name in model_files(folder, patterns):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        put(folder / name, to / name)


def sums_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Digest of these files of a folder, or of every one below it but its SHA256SUMS, by relative path, sorted."""
    if names is None:
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {name: sha256_of(folder / name) for name in sorted(names)}


def sums_text(sums: Mapping[str, str]) -> str:
    """The text of a SHA256SUMS."""
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def seal(folder: Path) -> str:
    """Write the SHA256SUMS of what a folder holds; gives its own sha256."""
    (folder / SUMS).write_text(sums_text(sums_of(folder)), encoding="utf-8")
    return sha256_of(folder / SUMS)


def seal_model(folder: Path, **origin: str) -> None:
    """Seal a model's folder, and write down where its files came from."""
    (folder / ORIGIN).write_text(json.dumps({**origin, "hash": seal(folder)}) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> dict[str, Any]:
    """What is known of a model's folder; nothing of one without a record, or with a damaged one."""
    return object_in(folder / ORIGIN)


def parse_sums(text: str) -> dict[str, str]:
    """Path -> digest of a SHA256SUMS text; ValueError for a bad line or a path that leads out."""
    sums = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        outside = {"", ".", ".."} & set(name.split("/")) or "\\" in name or not name.isprintable()
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or outside:
            raise ValueError(f"{SUMS} has the unreadable line {line!r}")
        sums[name] = digest
    return sums


UNUSED_S = 30 * 24 * 3600.0
"""After which a cache drops an entry."""


def mark_used(entry: Path) -> None:
    """Say that a cache's entry was used just now."""
    os.utime(entry)


def half_made(entry: Path) -> Path:
    """Where this process makes a cache's entry before it gets its name."""
    return entry.with_name(f".{entry.name}.{os.getpid()}")


def drop_unused(entries: Iterable[Path]) -> None:
    """Remove a cache's entries that were not used for a month, and those whose makers died before they were done."""
    for entry in entries:
        try:
            unused_s = time.time() - entry.stat().st_mtime
        except FileNotFoundError:  # another process tidies up too
            continue
        if unused_s > UNUSED_S or (entry.name.startswith(".") and not is_alive(entry.suffix[1:])):
            shutil.rmtree(entry, ignore_errors=True)


def is_alive(pid: str) -> bool:
    """Whether a process of this number runs on this machine, of whatever user."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError):
        return False
    return True


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
