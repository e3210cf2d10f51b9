"""Give an adapter or a merged model to a hub: listed first, private unless said otherwise, verified afterwards.

The token comes from HF_TOKEN or the hub client's own store; it is in no argument and no word said here. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.models.card import CardFacts, base_name, card, read_facts
from training.models.hub import HubError, SilentHubError, hub_of
from training.run.folder import is_run_id, run_of
from training.text.counts import size_text
from training.text.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LICENCE,
    MODEL,
    SUMS,
    TOKENIZER,
    bounded_json,
    is_one_of,
    object_in,
    parse_sums,
    sha256_of,
    sums_text,
)
from training.text.problems import AdapterError

Content = Path | bytes
ADAPTER = (ADAPTER_WEIGHTS, ADAPTER_CONFIG, *TOKENIZER)
MERGED = (*MODEL, *LICENCE)
"""What is published: no pickles and no programs, whatever else a head lays beside them."""
OURS = {".gitattributes", "README.md"}
"""In every repository, and replaced without a word."""


@dataclass(frozen=True)
class Parcel:
    """What goes to the hub: content by path in the repository."""

    repo: str
    files: Mapping[str, Content]
    private: bool = True
    left_out: tuple[str, ...] = ()
    """What lies beside them, by name."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {n: len(c) if isinstance(c, bytes) else c.stat().st_size for n, c in self.files.items()}

    def digests(self, path: str) -> set[str]:
        """What a hub may call a file's content: its sha256, or the id git gives it."""
        content = self.files[path]
        digests = {_sha256(content)}
        if isinstance(content, Path):
            content = content.read_bytes() if content.stat().st_size < 64 << 20 else b""
        return digests | {hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()}


@dataclass(frozen=True)
class Present:
    """A repository that exists already."""

    private: bool
    digests: Mapping[str, str]


def local_run(runs: Path, run_id: str) -> Path:
    """The folder of a run that was fetched; without an id the newest one."""
    known = {run: path.parent for path in runs.glob("*/adapter") if (run := run_of(path))}
    if run_id and run_id in known:
        return known[run_id]
    if is_run_id(run_id) and (runs / run_id / "model").is_dir():
        folder = runs / run_id / "model"
        raise AdapterError(
            f"{run_id} trained the whole model, and an adapter or a merged model is published; of huggingface_hub: "
            f"hf upload OWNER/NAME {folder}"
        )
    if run_id or not known:
        which = f"{run_id} is not" if run_id else "no run with an adapter is"
        raise AdapterError(f"{which} at {runs} on this machine; bring it home first: fab fetch --run RUN_ID")
    return known[max(known, key=lambda name: name[-15:])]


def parcel(run: Path, repo: str, merged: bool, private: bool) -> Parcel:
    """The files of a fetched run, verified against its checksums, with a model card."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo, re.ASCII):
        raise AdapterError(f"--repo {repo!r}: OWNER/NAME is expected, of letters, digits, '-', '_' and '.'")
    facts = read_facts(run, (run / "adapter").resolve().parent, merged)
    folder = run / "merged" if merged else run / "adapter"
    if merged and not (folder / SUMS).is_file():
        raise AdapterError(f"{folder} holds no merged model; make it and bring it home: fab merge --fetch")
    sealed = folder if merged else folder.resolve().parent
    sums = _verified(sealed, "" if merged else "adapter/")
    published = MERGED if merged else ADAPTER
    files = {name: _without_code(folder / name) for name in sums if is_one_of(name, published)}
    left_out = tuple(sorted(sums.keys() - files.keys()))
    if merged:
        files[SUMS] = sums_text({name: _sha256(content) for name, content in files.items()}).encode()
    else:
        files["adapter_config.json"] = _portable(folder / "adapter_config.json", facts)
    files["README.md"] = card(repo, facts, published=True).encode()
    return Parcel(repo, dict(sorted(files.items())), private, left_out)


def _without_code(path: Path) -> Content:
    """A configuration without the names of Python to import; any other file as it is."""
    config = object_in(path, json.loads) if path.name.endswith("config.json") else {}
    if "auto_map" not in config:
        return path
    del config["auto_map"]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _sha256(content: Content) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_of(content)


def _verified(folder: Path, below: str) -> dict[str, str]:
    """The sealed files below a folder's subfolder, by name; AdapterError where one is not what it was."""
    try:
        sums = parse_sums((folder / SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} cannot be verified: {error}") from error
    wanted = {name: digest for name, digest in sums.items() if name.startswith(below)}
    for name, digest in wanted.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise AdapterError(f"{folder / name} is missing or damaged; fetch it again, and publish then")
    return {name.removeprefix(below): digest for name, digest in wanted.items() if name != f"{below}README.md"}


def _portable(path: Path, facts: CardFacts) -> bytes:
    """adapter_config.json with the base model's name in place of its folder on a node."""
    config = bounded_json(path.read_text(encoding="utf-8"))
    if not str((config.get("auto_mapping") or {}).get("parent_library")).startswith("transformers."):
        config.pop("auto_mapping", None)  # names Python to import
    config["base_model_name_or_path"] = base_name(facts.base)
    if facts.base.on_hub and facts.recipe.get("revision", "main") != "main":
        config["revision"] = facts.recipe["revision"]
    return (json.dumps(config, indent=2) + "\n").encode()


def publish(hub: HuggingFace, what: Parcel, message: str, sure: bool, ask: Callable[[list[str]], None]) -> None:
    """List, ask, upload, verify; `ask` raises for a no. AdapterError where the repository is another's."""
    before = hub.present(what.repo)
    if before and what.private and not before.private:
        raise AdapterError(f"{what.repo} exists and is public; say --public, or another --repo")
    foreign = sorted(set(before.digests) - set(what.files) - OURS) if before else []
    if foreign and not sure:
        raise AdapterError(
            f"{what.repo} exists with other files ({', '.join(foreign[:3])}); --yes puts these beside them"
        )
    lines = [f"{size_text(size):>10}  {name}" for name, size in what.sizes.items()]
    lines += [f"{'left out':>10}  {name}" for name in what.left_out]
    lines.append(f"{size_text(sum(what.sizes.values())):>10}  to {hub.address(what.repo)}")
    ask([*lines, "private" if what.private else "PUBLIC: everyone can read it"])
    hub.upload(what, message)
    after = hub.present(what.repo)
    wrong = [name for name in what.files if not after or after.digests.get(name) not in what.digests(name)]
    if wrong or after is None or (what.private and not after.private):
        raise AdapterError(f"{what.repo} does not hold what was sent: {', '.join(wrong) or 'it is not private'}")


class HuggingFace:
    """The Hub, or what speaks its protocol at HF_ENDPOINT and is named as a host that may see the token."""

    def __init__(self) -> None:
        if "HF_ENDPOINT" in os.environ:
            os.environ["HF_HUB_DISABLE_XET"] = "1"  # Xet's servers are the Hub's own, never the mirror's
        from huggingface_hub import HfApi, get_token

        try:
            hub = hub_of(os.environ, get_token())
        except HubError as error:
            raise AdapterError(str(error)) from None
        if hub.withheld:
            raise AdapterError(f"publishing to {hub.host} shows it the token: {hub.how_to_enter}; or unset HF_ENDPOINT")
        if not hub.token:
            raise AdapterError(
                "no token for the Hub: set HF_TOKEN to one that may write, or log in with: hf auth login"
            )
        self._token, self._hub = hub.token, hub
        self._api = HfApi(hub.address, hub.token)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """The client's answer; its errors as one sentence, without the token whatever they quote."""
        from huggingface_hub.errors import HTTPError
        from huggingface_hub.utils import RepositoryNotFoundError

        try:
            return ask()
        except RepositoryNotFoundError:
            return None
        except SilentHubError as error:
            raise AdapterError(str(error)) from None
        except (HTTPError, OSError, ValueError) as error:
            words = " ".join(str(error).split()).replace(self._token, "(token)")
            raise AdapterError(f"the Hub refused: {words[:300]}") from None

    def present(self, repo: str) -> Present | None:
        """What the repository is now; None where there is none."""
        info = self._asked(lambda: self._hub.told(lambda _: self._api.model_info(repo, files_metadata=True)))
        if info is None:
            return None
        digests = {s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id or "" for s in info.siblings or []}
        return Present(bool(info.private), digests)

    def upload(self, parcel: Parcel, message: str) -> None:
        """Make the repository where there is none, and put the files there in one commit."""
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        adds = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in parcel.files.items()
        ]
        self._asked(lambda: self._api.create_repo(parcel.repo, private=parcel.private, exist_ok=True))
        done = self._asked(lambda: self._api.create_commit(parcel.repo, adds, commit_message=message))
        if done is None:
            raise AdapterError(f"the Hub knows no {parcel.repo}, or the token may not write there")

    def address(self, repo: str) -> str:
        """Where to look at it."""
        return f"{self._api.endpoint}/{repo}"
