"""Base models at /data/models/NAME: fetched, made or sent once to the head, copied to the others.

spotune-model.json is written last and says which repository, revision and commit lie there; SHA256SUMS has
every file. Sizes are compared on each run, contents too with `--data deep_verify=true`; what is wrong is
fetched again. A gated model needs HF_TOKEN in the environment of whoever runs pyinfra; it reaches the
head's standard input only, and the hub only when that asks for it (training/models/hub.py).

A folder of the user's is sent file by file; what of it lies there already is not sent again.

A recipe's revision is what training/recipes/models.lock says it is; what the lock does not know yet is written
there when it was fetched.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.api import DeployError, FactBase, FileUploadCommand, StringCommand, deploy
from pyinfra.operations import python

from deploy import fan_out
from deploy.node_files import MOUNT_POINT, refuse, refuse_unless, refuse_unless_mounted
from deploy.node_operation import Commands, node_operation
from deploy.on_node.probe import MODEL_STAMP as STAMP
from training.models.folder import state_of
from training.models.hub import TOKEN_HOST
from training.models.lock import LOCK, Pins, pinned, read_pins, remember
from training.models.names import Model, resolve
from training.recipe.base import Base, BaseKind
from training.recipe.recipe import RecipeError
from training.text.files import LICENCE, MODEL, model_files, parse_sums, sha256_of

HALF = ".sending"
"""The file that is on its way."""


class FileSums(FactBase[dict[str, str]]):
    """The sha256 of every file below a folder of the node, by relative path."""

    default = dict

    @staticmethod
    def command(path: str) -> str:
        find = "find . -type f -printf '%P\\0' | xargs -0r sha256sum --"
        return f"cd {shlex.quote(path)} 2>/dev/null && {find} 2>/dev/null; true"

    @staticmethod
    def process(lines: Iterable[str]) -> dict[str, str]:
        return parse_sums("\n".join(lines))


def send_commands(folder: Path, path: str, sums: Mapping[str, str]) -> Iterator[str | FileUploadCommand]:
    """What makes the folder `path` hold the model in `folder`, its licence, and no other files; `sums`: FileSums of
    what lies there."""
    names = model_files(folder, (*MODEL, *LICENCE))
    yield f"cd {shlex.quote(path)} && {shlex.join(['rm', '-f', '--', *sorted(sums.keys() - {*names}), HALF])}"
    for name in names:
        if sums.get(name) == sha256_of(folder / name):
            continue
        target = Path(path, name)
        yield FileUploadCommand(str(folder / name), f"{path}/{HALF}")
        # moved in one step: what lies there under its name is whole
        move = shlex.join(["mv", "--", f"{path}/{HALF}", str(target)])
        yield f"{shlex.join(['mkdir', '-p', str(target.parent)])} && {move}"


MODELS = f"{MOUNT_POINT}/models"
PYTHON = f"{MOUNT_POINT}/env/bin/python"
TRAINING = Path(__file__).parents[1] / "training"
ON_NODE = Path(__file__).with_name("on_node")
PROGRAMS = [ON_NODE / f"{name}.py" for name in ("__init__", "fetch_model", "probe")]
CODE = "/opt/spotune/code"
"""Where the head gets both, to make a built-in model or to fetch one with."""


@dataclass(frozen=True)
class ModelFolder:
    """What has to lie in one folder below /data/models."""

    base: Base
    revision: str
    folder: str
    commit: str = ""
    """Known beforehand: for a built-in model the hash of the code that makes it, for a folder the state of its files,
    else what models.lock says."""
    files: str = ""
    """sha256 of its manifest, where models.lock knows it."""

    @property
    def path(self) -> str:
        return f"{MODELS}/{self.folder}"

    def lies_there(self, state: dict[str, Any]) -> bool:
        """Whether the state found (fan_out.TreeState) is this model, complete."""
        stamp = state["stamp"]
        same = (stamp.get("repo"), stamp.get("revision")) == (str(self.base), self.revision)
        pinned = self.commit in ("", stamp.get("commit")) and self.files in ("", stamp.get("hash"))
        return same and pinned and not state["problems"]


def base_models(names: Iterable[str]) -> list[ModelFolder]:
    """The models of recipes, ids or folders, one a place; RecipeError for an unknown name or a place wanted twice."""
    models: dict[str, ModelFolder] = {}
    pins = read_pins()
    for name in names:
        model = _wanted(resolve(name), pins)
        other = models.setdefault(model.folder, model)
        if other != model:
            raise RecipeError(
                f"{MODELS}/{model.folder} is wanted for {other.base} at {other.revision} and for "
                f"{model.base} at {model.revision}; give one of the recipes another model_dir"
            )
    return list(models.values())


def _wanted(named: Model, pins: Pins) -> ModelFolder:
    pin, commit = pinned(pins, named.base, named.revision), ""
    if named.base.kind is BaseKind.BUILT_IN:
        commit = code_hash(TRAINING)
    elif named.base.folder and named.base.folder.is_dir():
        commit = state_of(named.base.folder)  # of one that is no longer here, what the head has is as good
    return ModelFolder(named.base, named.revision, named.place, commit or pin.commit, pin.files)


def code_hash(training: Path) -> str:
    """sha256 of the module that makes the built-in model: another one makes another model."""
    return hashlib.sha256((training / "models" / "tiny.py").read_bytes()).hexdigest()


def fetch_command(model: ModelFolder, python: str, endpoint: str, code: str = CODE, token_host: str = "") -> str:
    """Shell that fetches and seals a hub model with the code unpacked at `code`; the token comes on standard input."""
    fetch = shlex.join(["env", f"HF_ENDPOINT={endpoint}", f"{TOKEN_HOST}={token_host}", python, "-s", "-m"])
    module_call = shlex.join(["deploy.on_node.fetch_model", model.base.name, model.revision, model.commit, model.path])
    sealed = (
        f'commit=$(cd {shlex.quote(code)} && {fetch} {module_call}) && {seal_command(model, python)} commit="$commit"'
    )
    if not model.files:
        return sealed
    stamp = shlex.quote(f"{model.path}/{STAMP}")
    same_files = f'{{ grep -qs \'"hash": "{model.files}"\' {stamp} || {{ rm -f {stamp}; false; }}; }}'
    other = f"{model.base} at {model.commit} has other files than those first fetched: models.lock names their manifest"
    return f"{sealed} && {refuse_unless(same_files, other)}"


def make_commands(model: ModelFolder, python: str, code: str) -> Iterator[str]:
    """Shell that makes and seals a built-in model with the code unpacked at `code`."""
    yield shlex.join(["rm", "-rf", model.path])
    module = f"training.models.{model.base.name}"
    yield f"cd {shlex.quote(code)} && {shlex.join([python, '-s', '-m', module, model.path])}"
    yield f"{seal_command(model, python)} commit={shlex.quote(model.commit)}"


def seal_command(model: ModelFolder, python: str) -> str:
    """Shell that writes manifest and stamp; `commit=...` is to be appended."""
    facts = [f"repo={model.base}", f"revision={model.revision}"]
    exclude = [word for pattern in (".cache*", *LICENCE) for word in ("--exclude", pattern)]
    return fan_out.manifest_command("seal", *exclude, model.path, STAMP, *facts, python=python)


def packed(training: Path) -> bytes:
    """training/ and the deploy's programs as a tar archive, without what Python leaves behind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(training, arcname="training", filter=lambda e: None if "__pycache__" in e.name else e)
        for program in PROGRAMS:
            archive.add(program, arcname=f"deploy/on_node/{program.name}")
    return buffer.getvalue()


@node_operation
def base_model(model: ModelFolder, endpoint: str, check: str) -> Commands:
    """The model on the head, fetched or made."""
    state = host.get_fact(fan_out.TreeState, path=model.path, stamp=STAMP, check=check)
    if model.lies_there(state):
        host.noop(f"{model.path} is {model.base} {state['stamp'].get('commit', '')[:12]}")
        return
    if model.base.folder and not model.commit:
        yield refuse(f"{model.base.folder}: there is no such folder on this machine to send")
        return
    yield refuse_unless_mounted()
    stamp = shlex.quote(f"{model.path}/{STAMP}")
    yield refuse_unless(f"[ -x {PYTHON} ]", f"{model.path} is made with {PYTHON}, which is not there")
    yield f"mkdir -p {shlex.quote(model.path)} && rm -f {stamp}"
    if model.base.folder:
        sums = host.get_fact(FileSums, path=model.path)
        yield from send_commands(model.base.folder, model.path, sums)
        yield f"{seal_command(model, PYTHON)} commit={shlex.quote(model.commit)}"
        return
    archive = f"{CODE}.tar"
    yield shlex.join(["mkdir", "-p", CODE])
    yield FileUploadCommand(io.BytesIO(packed(TRAINING)), archive)
    yield shlex.join(["rm", "-rf", f"{CODE}/training", f"{CODE}/deploy"])
    yield f"tar -xf {archive} -C {CODE} --no-same-owner && rm {archive}"
    if model.base.kind is BaseKind.BUILT_IN:
        yield from make_commands(model, PYTHON, CODE)
        return
    # Read here, not passed as an argument: pyinfra shows operations' arguments.
    token, token_host = os.environ.get("HF_TOKEN", ""), os.environ.get(TOKEN_HOST, "")
    fetch = fetch_command(model, PYTHON, endpoint, token_host=token_host)
    yield StringCommand(fetch, _stdin=f"{token}\n")


def pin(model: ModelFolder) -> None:
    """Write the commit of a model that lies on the head into models.lock, where that does not know it yet."""
    state = host.get_fact(fan_out.TreeState, path=model.path, stamp=STAMP)
    try:
        new = remember(state["stamp"], model.base, model.revision)
    except OSError as error:
        host.log(f"{LOCK} cannot be written ({error.strerror}): {model.base} is not pinned")
        return
    except RecipeError as error:
        raise DeployError(str(error)) from error
    if new:
        commit = state["stamp"]["commit"][:12]
        host.log(f"{model.base}: {model.revision} is {commit} from now on; commit {LOCK.name} to keep it so")


@deploy("Base models")
def fetch_models() -> None:
    """Every base model the settings name: fetched on the head, copied to the others."""
    settings = host.data.settings
    try:
        models = base_models(settings.models.names)
    except RecipeError as error:
        raise DeployError(f"[models] names in cluster.toml: {error}") from error
    check = "verify" if str(host.data.get("deep_verify", "")).lower() == "true" else "check"
    head = host.data.cluster[0]
    for model in host.loop(models):
        if host.data.node.rank == 0:
            base_model(
                name=f"{model.folder} on the head",
                model=model,
                endpoint=settings.mirrors.resolved().hub,
                check=check,
            )
            if model.base.on_hub and not model.files:
                python.call(name=f"{model.folder} in {LOCK.name}", function=pin, model=model)
        else:
            fan_out.copy(
                name=f"{model.folder} from {head.name}",
                path=model.path,
                stamp=STAMP,
                source=head.name,
                check=check,
            )
