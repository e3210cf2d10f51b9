"""The errors that end a command or a rank: their base classes and exit codes, and the sentences for misspelt keys,
wrong values and files that are not UTF-8."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # what runs by a node's own Python has the standard library alone
    from pydantic_core import ErrorDetails, ValidationError

FINISHED = 0
FAILED = 1
"""Something broke; its last lines say what."""
UNUSABLE = 2
"""The recipe, the data or the base model cannot be trained with."""
STOPPED = 3
"""On request, after saving."""
WRONG_CHECKPOINT = 4
"""There is no checkpoint that this run could resume from."""
PEER_LOST = 5
"""It no longer heard the head or another rank, and left by itself."""
UNSAVED = 6
"""A checkpoint could not be written."""
NO_DEVICE = 7
"""The node's GPU cannot be used."""

SPOKEN = frozenset({UNUSABLE, WRONG_CHECKPOINT, UNSAVED, NO_DEVICE})
"""Such a rank said why in one last sentence."""


class TrainingError(Exception):
    """Its message is the whole sentence; its class says the exit code."""

    exit_code: ClassVar[int] = FAILED


class AdapterError(TrainingError, ValueError):
    """What was asked cannot be done with this adapter, model or place; the message says why."""

    exit_code = UNUSABLE


CALLED_ELSEWHERE = {
    "batch_size": "global_batch",
    "context_length": "max_length",
    "cutoff_len": "max_length",
    "global_batch_size": "global_batch",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target": "lora.targets",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.grad_clip",
    "max_len": "max_length",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "max_steps": "steps",
    "micro_batch_size": "micro_batch",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch",
    "r": "lora.rank",
    "save_steps": "save_every",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "target_modules": "lora.targets",
    "val_size": "validation.fraction",
    "warmup": "optimizer.warmup_steps",
}
"""What transformers, PEFT, TRL and LLaMA-Factory call a key."""
LIKE_IT = 0.6
"""Of `get_close_matches`: so alike two names must be."""


def called(key: str, known: Sequence[str]) -> str:
    """The known key with this name or another program's, with `_` for its dot, or the one that ends so; empty where
    none is called so. Keys of tables are dotted."""
    name = CALLED_ELSEWHERE.get(key, key)
    whole = [each for each in known if name in {each, each.replace(".", "_")}]
    return next(iter([*whole, *(each for each in known if each.endswith(f".{name}"))]), "")


def near(key: str, known: Sequence[str]) -> str:
    """The known key that is `called` so, or one spelt like it; empty where none is near."""
    if match := called(key, known):
        return match
    inner = {each.rpartition(".")[2]: each for each in reversed(known)}
    alike = get_close_matches(key, known, n=1, cutoff=LIKE_IT)
    alike = alike or [inner[each] for each in get_close_matches(key, list(inner), n=1, cutoff=LIKE_IT)]
    return alike[0] if alike else ""


EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number is expected"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number is expected"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false is expected"),
    "string_type": "a text is expected",
    "finite_number": "a finite number is expected",
    "literal_error": "{expected} is expected",
    "greater_than": "more than {gt:g} is expected",
    "greater_than_equal": "at least {ge:g} is expected",
    "less_than": "less than {lt:g} is expected",
    "less_than_equal": "at most {le:g} is expected",
}
"""By pydantic's types of errors, with what it tells beside them."""


def expected(problem: ErrorDetails) -> str:
    """What is expected in the place of a wrong value; where nobody has worded it, pydantic's message."""
    if words := EXPECTED.get(problem["type"]):
        return words.format(**problem.get("ctx", {}))
    return problem["msg"].removeprefix("Value error, ")


def first_problem(error: ValidationError) -> str:
    """The first value that cannot be, and what is expected in its place."""
    first = error.errors()[0]
    if not first["loc"]:  # all of it
        return expected(first)
    value = "missing" if first["type"] == "missing" else f"{first['input']!r:.60}: {expected(first)}"
    return f"{first['loc'][0]} is {value}"


LINES = 256
"""Lines outside ASCII that are looked at."""
PIECE = 1 << 16
"""Bytes looked at, of one line and of the whole sample."""
FEWEST = 4
"""Bytes outside ASCII that tell an encoding: two Chinese characters. Fewer are a broken line."""
CANDIDATES = (
    *("GB18030", "BIG5", "CP932", "EUC-JP", "CP949", "CP1250", "CP1251", "CP1252", "KOI8-R"),
    *("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE"),
)
"""Encodings that Python and iconv know by the same name."""


class EncodingError(ValueError):
    """A text file is not UTF-8; the message names the file, its likely encoding and the command that converts it."""


def text_of(file: Path) -> str:
    """The text of a small file such as TOML, without a byte order mark. Raises EncodingError, OSError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise EncodingError(f"{file}: {encoding_fault(foreign_sample(file) or b'', file)}") from None
    if "\0" in text and (sample := foreign_sample(file)):
        raise EncodingError(f"{file}: {encoding_fault(sample, file)}")
    return text


def foreign_sample(file: Path) -> bytes | None:
    """Some bytes of a text file that is not UTF-8; None for UTF-8, also with less than half of the lines broken."""
    with file.open("rb") as stream:
        head = stream.read(PIECE)
    if 0 < len(head) <= 4 * head.count(0):
        return head
    lines = list(_beyond_ascii(file))
    broken = [line for line in lines if _is_broken(line)]
    few = sum(byte > 127 for byte in b"".join(broken)[:PIECE]) < FEWEST
    return None if few or 2 * len(broken) < len(lines) else b"".join(lines)[:PIECE]


def encoding_fault(sample: bytes, file: Path | None) -> str:
    """What is wrong with a file that begins so, and the command that converts it, in its place where `file` says it:
    the old one stays beside it, with an ending that is not read as data."""
    from charset_normalizer import from_bytes

    guesses = from_bytes(sample, cp_isolation=list(CANDIDATES)) if sample else ()
    known = {codecs.lookup(encoding).name: encoding for encoding in CANDIDATES}
    if not (encodings := [known[codecs.lookup(guess.encoding).name] for guess in guesses]):
        return "not UTF-8, and its encoding is not recognised; save it as UTF-8"
    likely = encodings[0]
    also = f" ({' and '.join(encodings[1:3])} would fit too)" if encodings[1:] else ""
    command = f"iconv -f {likely} -t UTF-8"
    if file:
        at, fresh, backup = (shlex.quote(f"{file}{ending}") for ending in ("", ".utf8", f".{likely}"))
        command += f" {at} > {fresh} && mv {at} {backup} && mv {fresh} {at}"
    return f"not UTF-8; it looks like {likely}{also}; convert it, then check that it reads well: {command}"


def _beyond_ascii(file: Path) -> Iterator[bytes]:
    """The first lines that have letters outside ASCII, long ones cut."""
    count, begins = 0, True
    with file.open("rb") as stream:
        while count < LINES and (line := stream.readline(PIECE)):
            if begins and not line.isascii():
                count += 1
                yield line
            begins = line.endswith(b"\n")


def _is_broken(line: bytes) -> bool:
    """Whether half of its letters outside ASCII are not UTF-8; the last may be cut."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(line)
    return 2 * text.count("\ufffd") >= sum(not char.isascii() for char in text)
