"""The Python environment at /data/env: built once on the head, copied to the others.

An interpreter comes from the system (`venv`) or from conda (conda-python.lock); every package comes through uv from
requirements.lock. All of them are checked by hash. /data/env/spotune-env.json is written last and means: complete. An
unfinished build is begun anew; what it had downloaded is kept until one succeeds.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from pyinfra import host
from pyinfra.api import FileUploadCommand, deploy
from pyinfra.facts.files import Directory

from deploy import environment, fan_out
from deploy.environment import LOCK, Environment, environment_from
from deploy.node_files import MOUNT_POINT, refuse, refuse_unless, refuse_unless_mounted, refuse_while_running, text_of
from deploy.node_operation import Commands, node_operation
from deploy.on_node.probe import ENVIRONMENT_STAMP as STAMP
from deploy.packages import reach_command
from training.run.environment import AS_DEPLOYED

TOOLS = ("uv", "setuptools", "wheel", "packaging")
"""What installs the packages, and what builds those that come as source."""


@dataclass(frozen=True)
class EnvPaths:
    """Where things lie on the head."""

    env: str = f"{MOUNT_POINT}/env"
    conda: str = f"{MOUNT_POINT}/conda"
    cache: str = f"{MOUNT_POINT}/env.cache"
    """uv's downloads, on the same filesystem so that packages are hard links of them."""
    lists: str = "/opt/spotune/env"
    wheelhouse: str = "/opt/spotune/wheelhouse"
    """The local cloud puts every wheel there; where it exists no index is asked."""


def interpreter_commands(wanted: Environment, at: EnvPaths) -> Iterator[str]:
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
    mirrors = wanted.mirrors
    yield environment.install_command(environment.installer_urls(mirrors.miniforge), at.conda)
    yield f"printf %s {shlex.quote(environment.condarc(mirrors.conda))} > {shlex.quote(f'{at.conda}/.condarc')}"
    yield remove
    packages = f"{at.conda}/python.txt"
    yield f"printf %s {shlex.quote(environment.explicit_list(mirrors.conda))} > {shlex.quote(packages)}"
    yield shlex.join([f"{at.conda}/bin/conda", "create", "-y", "-p", at.env, "--file", packages])


def package_lists(wanted: Environment) -> dict[str, str]:
    """Requirement files the packages are installed from, by file name."""
    return {
        "tools.txt": "".join(environment.one_requirement(wanted.lock, name) for name in TOOLS),
        "packages.txt": environment.hashed_requirements(wanted.lock, wanted.flavour),
    }


CLEAN = (
    "unset $(env | sed -nE 's/^((PIP_|UV_|PYTHON|LD_)[A-Z0-9_]*)=.*/\\1/p'); "
    "export PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1 PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1; "
)
"""Shell after which pip, uv and Python go by their arguments: not by files or variables of the node."""


NOT_FETCHED = (
    "the packages could not be fetched: the reason stands above; if their index is out of reach, [mirrors] in "
    "cluster.toml takes another one, preset = china one in China"
)


def package_commands(wanted: Environment, at: EnvPaths, complete_wheelhouse: bool) -> Iterator[str]:
    """Shell that fills the environment: uv by pip, all else by uv; then whether it fits together.

    Some packages are source archives, whose build runs as root: what builds them is the environment's own setuptools,
    which came by hash. With isolation uv would fetch whatever they ask for, unpinned.
    """
    python = f"{at.env}/bin/python"
    sources = _sources(wanted, at, complete_wheelhouse)
    mirror = wanted.mirrors.pypi
    reach = reach_command(mirror, "the packages cannot be fetched") if mirror else refuse(NOT_FETCHED)
    why = "" if complete_wheelhouse else f" || {{ code=$?; {reach}; exit $code; }}"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    tools = ["--only-binary", ":all:", "--require-hashes", "-r", f"{at.lists}/tools.txt"]
    yield f"{CLEAN}{shlex.join([*pip, *sources, *tools])}{why}"
    uv = ["env", f"UV_CACHE_DIR={at.cache}", "UV_HTTP_TIMEOUT=300", "UV_HTTP_RETRIES=5"]
    uv += [f"{at.env}/bin/uv", "pip", "install", "--quiet", "--python", python, "--no-deps", *sources]
    all_else = shlex.join([*uv, "--no-build-isolation", "--require-hashes", "-r", f"{at.lists}/packages.txt"])
    yield f"{CLEAN}{all_else}{why}"
    if wanted.flavour == "cpu":
        # The lock's hashes are those of the CUDA wheel; the CPU one is pinned by version, and uv holds it against the
        # hash in PyTorch's own index, which it asks over https and through no mirror.
        index = [] if complete_wheelhouse else ["--torch-backend", "cpu"]
        yield CLEAN + shlex.join([*uv, "--no-build", *index, environment.torch_pin(wanted.lock)])
    yield CLEAN + shlex.join([f"{at.env}/bin/uv", "pip", "check", "--quiet", "--python", python])


def _sources(wanted: Environment, at: EnvPaths, complete_wheelhouse: bool) -> list[str]:
    if complete_wheelhouse:
        return ["--no-index", "--find-links", at.wheelhouse]
    options = ["--find-links", wanted.wheelhouse] if wanted.wheelhouse else []
    return options + (["--index-url", wanted.mirrors.pypi] if wanted.mirrors.pypi else [])


def finishing_commands(wanted: Environment, at: EnvPaths) -> Iterator[str]:
    """Shell that writes the manifest and, after a trial import in the ranks' environment, the stamp."""
    python = f"{at.env}/bin/python"
    # Written again while the environment is used, so they are no part of what must stay the same.
    changing = ["*__pycache__*", "torch_extensions/*", STAMP]
    excluded = [word for pattern in changing for word in ("--exclude", pattern)]
    yield f"{fan_out.manifest_command('write', at.env, *excluded, python=python)} >/dev/null"
    trial = [python, "-P", "-c", text_of("record_environment.py"), f"{at.env}/{STAMP}", wanted.hash]
    yield shlex.join(["env", "-i", *(f"{name}={value}" for name, value in AS_DEPLOYED.items()), *trial])
    yield shlex.join(["rm", "-rf", at.cache])


def interpreter_probe(env: str) -> str:
    """Shell that prints a line where an environment's interpreter is not the one it was built with.

    One that was made by the system's Python comes along with a disk; what it points to may be another on this image.
    """
    python = f"{env}/bin/python"
    check = [python, "-I", "-c", text_of("check_interpreter.py"), f"{env}/{STAMP}"]
    return f"{shlex.join(check)} 2>/dev/null || echo {shlex.quote(f'{python} does not run')}"


@node_operation
def environment_on_head(wanted: Environment) -> Commands:
    """The finished environment on the head."""
    at = EnvPaths()
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
        environment_on_head(name="Built on the head", wanted=wanted)
    else:
        fan_out.copy(
            name=f"Copied from {head.name}",
            path=EnvPaths.env,
            stamp=STAMP,
            source=head.name,
            wanted_hash=wanted.hash,
            probe=interpreter_probe(EnvPaths.env),
            runs_use_it=True,
        )
