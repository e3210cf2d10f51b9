"""The Python environment at /data/env: built once on the head, copied to the others.

An interpreter comes from the system (`venv`) or from conda; every package comes through uv from
requirements.lock, checked by hash. /data/env/spotune-env.json is written last and means: complete. An
unfinished build is begun anew; what it had downloaded is kept until one succeeds.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyinfra import host
from pyinfra.api import FileUploadCommand, deploy
from pyinfra.facts.files import Directory

from deploy import fan_out, requirements_lock
from deploy.disk_facts import MOUNT_POINT
from deploy.node_operation import Commands, node_operation
from deploy.refusal import refuse_unless, refuse_unless_mounted, refuse_while_running
from inventory.settings import Settings

LOCK = Path(__file__).with_name("requirements.lock")
STAMP = "spotune-env.json"
TOOLS = ("uv", "setuptools", "wheel", "packaging")
"""What installs the packages, and what builds those that come as source."""
BUILD_VERSION = 1
"""Raise it when the commands below build something else from the same lock."""


@dataclass(frozen=True)
class Installer:
    """A conda installer for Linux x86_64, pinned."""

    file: str
    sha256: str
    url: str
    """The release it belongs to."""


INSTALLERS = {
    "miniforge": Installer(
        file="Miniforge3-26.3.2-3-Linux-x86_64.sh",
        sha256="848194851a98903134187fbb4ab50efe87b003e0c0f808f97644b7524a62bf2c",
        url="https://github.com/conda-forge/miniforge/releases/download/26.3.2-3",
    ),
    "miniconda": Installer(
        file="Miniconda3-py312_26.3.2-2-Linux-x86_64.sh",
        sha256="32673413a39a21ae3997c9b38236e9df15c9fcef930b510487c64fe259e03f95",
        url="https://repo.anaconda.com/miniconda",
    ),
}
# How the Chinese mirrors of Miniforge's releases name a release's folder.
MIRRORED_RELEASE = "Release%2026.3.2-3"
MINICONDA_NOTE = (
    "Miniconda's installer and its default channel need a paid licence in organisations above 200 people. "
    'Packages are taken from conda-forge all the same; distribution = "miniforge" needs no licence.'
)


@dataclass(frozen=True)
class Places:
    """Where things lie on the head."""

    env: str = f"{MOUNT_POINT}/env"
    conda: str = f"{MOUNT_POINT}/conda"
    cache: str = f"{MOUNT_POINT}/env.cache"
    """uv's downloads, on the same filesystem so that packages are hard links of them."""
    lists: str = "/opt/spotune/env"
    wheelhouse: str = "/opt/spotune/wheelhouse"
    """The local cloud puts every wheel there; where it exists no index is asked."""


@dataclass(frozen=True)
class Environment:
    """What the settings ask for."""

    provider: str
    distribution: str
    flavour: str
    python: str
    """Version conda installs; venv takes the system's."""
    lock: str
    pypi: str
    conda: str
    miniforge: str
    wheelhouse: str

    @property
    def hash(self) -> str:
        """Changes when the environment has to be built again; mirrors do not count."""
        python = [self.distribution, self.python] if self.provider == "conda" else ["system"]
        parts = [BUILD_VERSION, self.provider, *python, self.flavour, requirements_lock.lock_hash(self.lock)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment_from(settings: Settings, lock: str) -> Environment:
    """The environment cluster.toml asks for."""
    mirrors = settings.mirrors.resolved()
    return Environment(
        provider=settings.python_provider,
        distribution=settings.python.distribution,
        flavour=settings.torch_flavour,
        python=settings.python.version,
        lock=lock,
        pypi=mirrors.pypi,
        conda=mirrors.conda,
        miniforge=mirrors.miniforge,
        wheelhouse=settings.python.wheelhouse,
    )


def interpreter_commands(wanted: Environment, at: Places) -> Iterator[str]:
    """Shell that makes an empty environment with pip in it, in place: environments cannot be moved."""
    remove = shlex.join(["rm", "-rf", at.env])  # only when nothing is left to refuse
    if wanted.provider == "venv":
        yield refuse_unless(
            "python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'",
            'the system\'s Python is older than 3.11: set [python] provider = "conda" in cluster.toml',
        )
        yield remove
        yield shlex.join(["python3", "-m", "venv", at.env])
        return
    yield from conda_commands(INSTALLERS[wanted.distribution], installer_urls(wanted), at)
    yield f"printf %s {shlex.quote(condarc(wanted.conda))} > {shlex.quote(f'{at.conda}/.condarc')}"
    yield remove
    channel = ["--override-channels", "--channel", "conda-forge"]
    yield shlex.join(
        [f"{at.conda}/bin/conda", "create", "-y", "-p", at.env, *channel, f"python={wanted.python}", "pip"]
    )


def conda_commands(installer: Installer, urls: list[str], at: Places) -> Iterator[str]:
    """Shell that installs conda where this very one is not: the first source whose file has the pinned sha256."""
    stamp = shlex.quote(f"{at.conda}/.spotune-installer")
    done = f"grep -qsx {installer.sha256} {stamp}"
    yield f"{done} || " + refuse_unless('[ "$(uname -m)" = x86_64 ]', f"{installer.file} is for x86_64 machines only")
    file = shlex.quote(f"{at.conda}.sh")
    check = f"echo {shlex.quote(f'{installer.sha256}  {at.conda}.sh')} | sha256sum --check --status"
    fetch = (
        f"rm -f {file}; for url in {shlex.join(urls)}; do "
        f'curl -fsSL --retry 3 --connect-timeout 20 -o {file} "$url" && {check} && break; '
        f"rm -f {file}; done; "
    )
    found = refuse_unless(f"[ -f {file} ]", f"no {installer.file} with the pinned sha256 at {' or '.join(urls)}")
    prefix = shlex.quote(at.conda)
    yield (
        f"{done} || {{ {fetch}{found}; rm -rf {prefix}; bash {file} -b -p {prefix} && rm -f {file} && "
        f"echo {installer.sha256} > {stamp}; }}"
    )


def installer_urls(wanted: Environment) -> list[str]:
    """Where the installer may come from, the mirror first; its sha256 decides, not where it comes from."""
    installer = INSTALLERS[wanted.distribution]
    own = f"{installer.url}/{installer.file}"
    if wanted.distribution != "miniforge" or not wanted.miniforge:
        return [own]
    return [f"{wanted.miniforge.rstrip('/')}/{MIRRORED_RELEASE}/{installer.file}", own]


def condarc(mirror: str) -> str:
    """conda's configuration: conda-forge alone, through the mirror if there is one."""
    lines = ["channels: [conda-forge]", "channel_priority: strict", "auto_update_conda: false"]
    lines += ["remote_max_retries: 6"]
    if mirror:
        lines += ["custom_channels:", f"  conda-forge: {mirror.rstrip('/')}"]
    return "\n".join(lines) + "\n"


def package_lists(wanted: Environment) -> dict[str, str]:
    """Requirement files the packages are installed from, by file name."""
    return {
        "tools.txt": "".join(requirements_lock.one_requirement(wanted.lock, name) for name in TOOLS),
        "packages.txt": requirements_lock.hashed_requirements(wanted.lock, wanted.flavour),
    }


def package_commands(wanted: Environment, at: Places, complete_wheelhouse: bool) -> Iterator[str]:
    """Shell that fills the environment: uv by pip, all else by uv; then whether it fits together.

    Some packages are source archives, whose build runs as root: what builds them is the environment's own setuptools,
    which came by hash. With isolation uv would fetch whatever they ask for, unpinned.
    """
    python = f"{at.env}/bin/python"
    sources = _sources(wanted, at, complete_wheelhouse)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    tools = ["--only-binary", ":all:", "--require-hashes", "-r", f"{at.lists}/tools.txt"]
    yield shlex.join([*pip, *sources, *tools])
    uv = ["env", f"UV_CACHE_DIR={at.cache}", "UV_HTTP_TIMEOUT=300", "UV_HTTP_RETRIES=5"]
    uv += [f"{at.env}/bin/uv", "pip", "install", "--quiet", "--python", python, "--no-deps", *sources]
    yield shlex.join([*uv, "--no-build-isolation", "--require-hashes", "-r", f"{at.lists}/packages.txt"])
    if wanted.flavour == "cpu":
        # The lock's hashes are those of the CUDA wheel; the CPU one is pinned by version alone.
        index = [] if complete_wheelhouse else ["--torch-backend", "cpu"]
        yield shlex.join([*uv, "--no-build", *index, requirements_lock.torch_pin(wanted.lock)])
    yield shlex.join([f"{at.env}/bin/uv", "pip", "check", "--quiet", "--python", python])


def _sources(wanted: Environment, at: Places, complete_wheelhouse: bool) -> list[str]:
    if complete_wheelhouse:
        return ["--no-index", "--find-links", at.wheelhouse]
    found = ["--find-links", wanted.wheelhouse] if wanted.wheelhouse else []
    return found + (["--index-url", wanted.pypi] if wanted.pypi else [])


DESCRIBE = """
import datetime, json, os, platform, sys
import deepspeed, peft, torch, transformers
stamp, digest = sys.argv[1:]
built = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
record = {"hash": digest, "torch": torch.__version__, "python": platform.python_version(), "built": built}
with open(stamp + ".tmp", "w") as file:
    json.dump(record, file)
    file.flush()
    os.fsync(file.fileno())
os.replace(stamp + ".tmp", stamp)
"""


def finishing_commands(wanted: Environment, at: Places) -> Iterator[str]:
    """Shell that writes the manifest and, after a trial import, the stamp."""
    python = f"{at.env}/bin/python"
    # Written again while the environment is used, so they are no part of what must stay the same.
    changing = ["*__pycache__*", "torch_extensions/*", STAMP]
    excluded = [word for pattern in changing for word in ("--exclude", pattern)]
    yield f"{fan_out.manifest_command('write', at.env, *excluded, python=python)} >/dev/null"
    yield shlex.join([python, "-c", DESCRIBE, f"{at.env}/{STAMP}", wanted.hash])
    yield shlex.join(["rm", "-rf", at.cache])


INTERPRETER = """
import json, sys
with open(sys.argv[1]) as file:
    built = json.load(file)["python"]
if built.split(".")[:2] != [str(part) for part in sys.version_info[:2]]:
    print(f"built with Python {built}, run by {sys.version.split()[0]}")
"""


def interpreter_probe(env: str) -> str:
    """Shell that prints a line where an environment's interpreter is not the one it was built with.

    One that was made by the system's Python comes along with a disk; what it points to may be another on this image.
    """
    python = f"{env}/bin/python"
    asked = shlex.join([python, "-I", "-c", INTERPRETER, f"{env}/{STAMP}"])
    return f"{asked} 2>/dev/null || echo {shlex.quote(f'{python} does not run')}"


@node_operation
def environment(wanted: Environment) -> Commands:
    """The finished environment on the head."""
    at = Places()
    state = host.get_fact(fan_out.TreeState, path=at.env, stamp=STAMP, probe=interpreter_probe(at.env))
    if fan_out.same_as_source(state, wanted.hash):
        host.noop(f"{at.env} is {wanted.hash[:12]}")
        return
    for problem in state["problems"]:
        _say(f"{at.env} cannot be used here: {problem}")
    complete_wheelhouse = bool(host.get_fact(Directory, path=at.wheelhouse))
    yield refuse_unless_mounted()
    yield refuse_while_running(at.env)
    _say(f"making a {wanted.provider} environment at {at.env}")
    yield from interpreter_commands(wanted, at)
    yield shlex.join(["mkdir", "-p", at.lists])
    for name, text in package_lists(wanted).items():
        yield FileUploadCommand(io.StringIO(text), f"{at.lists}/{name}")
    _say(f"installing the packages, torch for {wanted.flavour}")
    yield from package_commands(wanted, at, complete_wheelhouse)
    _say("checking them")
    yield from finishing_commands(wanted, at)


def _say(message: str) -> None:
    """Progress of a long operation; the preparing pass runs it too and keeps silent."""
    if host.state.is_executing:
        host.log_styled(message, fg="cyan")


@deploy("Python environment")
def build_environment() -> None:
    """Build on the head, copy to the others."""
    wanted = environment_from(host.data.settings, LOCK.read_text(encoding="utf-8"))
    head = host.data.cluster[0]
    if host.data.node.rank == 0:
        if wanted.provider == "conda" and wanted.distribution == "miniconda":
            host.log_styled(MINICONDA_NOTE, fg="yellow")
        environment(name="Built on the head", wanted=wanted)
    else:
        fan_out.copy(
            name=f"Copied from {head.name}",
            path=Places.env,
            stamp=STAMP,
            source=head.name,
            wanted_hash=wanted.hash,
            probe=interpreter_probe(Places.env),
            runs_use_it=True,
        )
