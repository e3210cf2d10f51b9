"""The Python environment: the deploy's own shell run in a temporary folder, with the real uv.

Wheels of torch and its company are stand-ins of a few hundred bytes, and so is the Miniforge installer.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import environment, fan_out, python_env
from deploy.node_files import REFUSED
from deploy.python_env import Environment, EnvPaths
from inventory.settings import Mirrors, Python, Settings
from tests.support.fake_nodes import NODE, deploy
from training.run.environment import AS_DEPLOYED

LOCK = python_env.LOCK.read_text()
LOCAL = {"aliyun": {"endpoint": "local"}}
HERE = Settings(**LOCAL)
STAND_IN = Path(__file__).parents[1] / "support" / "conda_stand_in"
MODULES = {
    "torch": {"torch/__init__.py": "__version__ = '2.13.0+cpu'"},
    "deepspeed": {"deepspeed/__init__.py": ""},
    "peft": {"peft/__init__.py": ""},
    "transformers": {"transformers/__init__.py": ""},
}


@dataclass(frozen=True)
class Ground:
    """A folder to build in, and a lock over the stand-in wheels in its wheelhouse."""

    at: EnvPaths
    lock: str

    def wanted(self, **changes: Any) -> Environment:
        return replace(python_env.environment_from(HERE, self.lock), **changes)

    def fill(self, wanted: Environment) -> None:
        lists = Path(self.at.lists)
        lists.mkdir(exist_ok=True)
        for name, text in python_env.package_lists(wanted).items():
            (lists / name).write_text(text)

    def run(self, commands: Iterator[str], **variables: str) -> None:
        """Every command in turn, as pyinfra would, up to the first that fails; the node's environment has these."""
        for command in commands:
            done = subprocess.run(
                ["sh", "-c", command],
                env={
                    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "HOME": self.at.lists,
                    **variables,
                },
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise AssertionError(done.stderr)

    @property
    def python(self) -> Path:
        return Path(self.at.env, "bin/python")

    def stamp(self) -> dict[str, str]:
        return json.loads(Path(self.at.env, python_env.STAMP).read_text())


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> str:
    """A wheel in folder; returns its sha256."""
    info = f"{name}-{version}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*everything, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**everything, f"{info}/RECORD": record}.items():
            archive.writestr(member, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_archive(folder: Path, name: str, builder: str) -> str:
    """A source archive of version 1.0 in folder, to be built by `builder`; returns its sha256."""
    backend = "setuptools.build_meta" if builder == "setuptools" else builder
    files = {
        "pyproject.toml": f'[build-system]\nrequires = ["{builder}"]\nbuild-backend = "{backend}"\n',
        "setup.py": f"from setuptools import setup\nsetup(name='{name}', version='1.0', py_modules=['{name}'])\n",
        f"{name}.py": "",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for member, text in files.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{member}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real uv, setuptools and wheel of our lock, from whatever index this machine has."""
    folder = tmp_path_factory.mktemp("tools")
    wanted = folder / "tools.txt"
    wanted.write_text("".join(environment.one_requirement(LOCK, name) for name in python_env.TOOLS))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*command, "--dest", folder, "-r", wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"uv cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def paths(folder: Path) -> EnvPaths:
    """All in a folder."""
    return EnvPaths(
        env=str(folder / "env"),
        conda=str(folder / "conda"),
        cache=str(folder / "env.cache"),
        lists=str(folder / "lists"),
        wheelhouse=str(folder / "wheelhouse"),
    )


def new_ground(folder: Path, tools: Path) -> Ground:
    at = paths(folder)
    wheels = Path(at.wheelhouse)
    wheels.mkdir()
    for tool in tools.glob("*.whl"):
        (wheels / tool.name).symlink_to(tool)
    lock = "".join(environment.one_requirement(LOCK, name) for name in python_env.TOOLS)
    for name, files in MODULES.items():
        version = "2.13.0+cpu" if name == "torch" else "1.0"
        digest = wheel(wheels, name, version, files)
        # as in our lock, torch's hash is that of another file: the CUDA wheel
        digest = "0" * 64 if name == "torch" else digest
        lock += f"{name}=={version.partition('+')[0]} \\\n    --hash=sha256:{digest}\n"
    return Ground(at, lock)


@pytest.fixture
def ground(tmp_path: Path, tools: Path) -> Ground:
    return new_ground(tmp_path, tools)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Ground:
    """Where everything is installed, and nothing finished."""
    ground = new_ground(tmp_path_factory.mktemp("installed"), tools)
    wanted = ground.wanted()
    ground.run(python_env.interpreter_commands(wanted, ground.at))
    ground.fill(wanted)
    ground.run(python_env.package_commands(wanted, ground.at, complete_wheelhouse=True))
    return ground


@pytest.fixture
def built(tmp_path: Path, installed: Ground) -> Ground:
    """A copy of that."""
    shutil.copytree(Path(installed.at.env).parent, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Ground(paths(tmp_path), installed.lock)


def test_an_environment_is_stamped_last_and_only_if_it_can_be_imported(built: Ground) -> None:
    wanted = built.wanted()
    imported = next(Path(built.at.env).glob("lib/python3*/site-packages/peft/__init__.py"))
    imported.write_text("import nothing_here")
    with pytest.raises(AssertionError, match="nothing_here"):
        built.run(python_env.finishing_commands(wanted, built.at))
    assert not Path(built.at.env, python_env.STAMP).exists()
    imported.write_text("")
    built.run(python_env.finishing_commands(wanted, built.at))
    assert (built.stamp()["hash"], built.stamp()["torch"]) == (wanted.hash, "2.13.0+cpu")
    assert not Path(built.at.cache).exists()
    built.run(iter([fan_out.manifest_command("verify", built.at.env)]))


def test_what_root_tells_pip_and_uv_changes_nothing(built: Ground, tmp_path: Path) -> None:
    elsewhere, settings = tmp_path / "elsewhere", Path(built.at.lists, ".config")
    files = {"pip/pip.conf": f"[install]\ntarget = {elsewhere}\n", "uv/uv.toml": f'[pip]\ntarget = "{elsewhere}"\n'}
    for name, text in files.items():
        (settings / name).parent.mkdir(parents=True)
        (settings / name).write_text(text)
    variables = {"PIP_REQUIRE_VIRTUALENV": "1", "PIP_TARGET": str(elsewhere), "UV_TARGET": str(elsewhere)}
    installed = next(Path(built.at.env).glob("lib/python3*/site-packages"))
    for each in (installed / "peft", next(installed.glob("peft-*"))):
        shutil.rmtree(each)
    commands = python_env.package_commands(built.wanted(), built.at, complete_wheelhouse=True)
    built.run(commands, **variables, UV_EXCLUDE_NEWER="2001-01-01", PYTHONHOME="/opt/python")
    assert (installed / "peft").exists() and not elsewhere.exists()


def test_the_trial_import_has_the_environment_of_the_ranks(built: Ground) -> None:
    imported = next(Path(built.at.env).glob("lib/python3*/site-packages/peft/__init__.py"))
    imported.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    *_, trial, _ = python_env.finishing_commands(built.wanted(), built.at)
    env = {"PATH": "/usr/bin:/bin", "NCCL_DEBUG": "TRACE", "LD_LIBRARY_PATH": "/opt/lib", "PYTHONPATH": "/opt/old"}
    done = subprocess.run(["sh", "-c", trial], env=env, capture_output=True, text=True, check=True)
    assert {**json.loads(done.stdout), "LC_CTYPE": ""} == {**AS_DEPLOYED, "LC_CTYPE": ""}


def test_without_a_mirror_what_pip_says_is_not_called_the_internet(tmp_path: Path) -> None:
    wanted = replace(python_env.environment_from(HERE, LOCK), mirrors=Mirrors())
    first, *_ = python_env.package_commands(wanted, paths(tmp_path), complete_wheelhouse=False)
    done = subprocess.run(["sh", "-c", first], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (done.returncode, environment.NO_INTERNET in done.stderr) == (REFUSED, False)
    assert "[mirrors]" in done.stderr


@pytest.mark.parametrize("listens", [True, False])
def test_the_internet_is_named_only_where_it_is_not_reached(tmp_path: Path, listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        index = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        if not listens:
            server.close()
        wanted = replace(python_env.environment_from(HERE, LOCK), mirrors=Mirrors(pypi=index))
        first, *_ = python_env.package_commands(wanted, paths(tmp_path), complete_wheelhouse=False)
        done = subprocess.run(["sh", "-c", first], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (done.returncode, environment.NO_INTERNET in done.stderr) == ((127, False) if listens else (REFUSED, True))


def found(ground: Ground) -> dict[str, object]:
    """What the base deploy learns of the environment on a node."""
    probe = python_env.interpreter_probe(ground.at.env)
    command = fan_out.state_command(ground.at.env, python_env.STAMP, "none", probe=probe)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    return fan_out.parse_state(done.stdout.splitlines())


def test_an_environment_whose_interpreter_is_another_on_this_image_is_not_taken(built: Ground) -> None:
    wanted = built.wanted()
    built.run(python_env.finishing_commands(wanted, built.at))
    assert fan_out.same_as_source(found(built), wanted.hash)
    stamp = Path(built.at.env, python_env.STAMP)
    stamp.write_text(json.dumps({**built.stamp(), "python": "3.4.1"}))
    (problem,) = found(built)["problems"]
    assert problem.startswith("built with Python 3.4.1, run by 3.")
    built.python.unlink()
    built.python.symlink_to("/usr/bin/python-of-another-image")
    state = found(built)
    assert state["stamp"]["hash"] == wanted.hash and state["problems"] == [f"{built.python} does not run"]
    assert not fan_out.same_as_source(state, wanted.hash)
    stamp.unlink()
    assert found(built)["problems"] == []


@pytest.mark.parametrize("problem", ["", "built with Python 3.4.1, run by 3.13.5"])
def test_head_and_workers_take_a_restored_environment_only_with_its_interpreter(problem: str) -> None:
    wanted = python_env.environment_from(HERE, LOCK)
    stamp = json.dumps({"hash": wanted.hash, "python": "3.4.1"})
    restored = {**NODE, "sys.version_info[:2]": [stamp, "--spotune--", problem, "--spotune--"]}
    told = deploy("deploy.python_env.build_environment", {"te1": restored, "te2": restored}, settings=LOCAL)["told"]
    assert any("rm -rf /data/env" in command for command in told["te1"]) is bool(problem)
    assert any("rsync" in command for command in told["te2"]) is bool(problem)


def test_a_wheel_with_another_hash_is_refused(built: Ground) -> None:
    wheel(Path(built.at.wheelhouse), "other", "1.0", {"other.py": ""})
    refused = Ground(built.at, f"{built.lock}other==1.0 \\\n    --hash=sha256:{'1' * 64}\n")
    refused.fill(refused.wanted())
    with pytest.raises(AssertionError, match=r"(?i)hash"):
        refused.run(python_env.package_commands(refused.wanted(), refused.at, complete_wheelhouse=True))


def test_a_source_archive_is_built_by_what_the_lock_names_and_nothing_is_fetched_for_it(built: Ground) -> None:
    wheels, ran = Path(built.at.wheelhouse), Path(built.at.env, "an-unpinned-builder-ran")
    wheel(wheels, "stranger", "1.0", {"stranger.py": f"open({str(ran)!r}, 'w')"})
    ours = source_archive(wheels, "ours", "setuptools")
    theirs = source_archive(wheels, "theirs", "stranger")
    more = Ground(built.at, f"{built.lock}ours==1.0 \\\n    --hash=sha256:{ours}\n")
    more.fill(more.wanted())
    more.run(python_env.package_commands(more.wanted(), more.at, complete_wheelhouse=True))
    assert list(Path(more.at.env).glob("lib/python3*/site-packages/ours.py"))
    refused = Ground(built.at, f"{more.lock}theirs==1.0 \\\n    --hash=sha256:{theirs}\n")
    refused.fill(refused.wanted())
    with pytest.raises(AssertionError, match="stranger"):
        refused.run(python_env.package_commands(refused.wanted(), refused.at, complete_wheelhouse=True))
    assert not ran.exists()


def test_an_old_system_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    at = EnvPaths(env=str(tmp_path / "env"))
    wanted = python_env.environment_from(HERE, LOCK)
    refusal, remove, _ = python_env.interpreter_commands(wanted, at)
    done = subprocess.run(
        ["sh", "-c", refusal], env={"PATH": f"{tmp_path}:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == REFUSED
    assert "rm -rf" in remove, "and only then the old environment goes"
    assert done.stderr == ('the system\'s Python is older than 3.11: set [python] provider = "conda" in cluster.toml\n')


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Path:
    pin(monkeypatch, STAND_IN)
    return STAND_IN


def pin(monkeypatch: pytest.MonkeyPatch, file: Path, sha256: str = "") -> None:
    """Have a file in place of Miniforge's installer."""
    monkeypatch.setattr(environment, "INSTALLER", file.name)
    monkeypatch.setattr(environment, "INSTALLER_SHA256", sha256 or hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(environment, "RELEASE_URL", file.parent.as_uri())


def test_stand_in_conda_is_installed_once_and_makes_the_environment(ground: Ground, stand_in: Path) -> None:
    wanted = ground.wanted(provider="conda")
    ground.run(python_env.interpreter_commands(wanted, ground.at))
    assert ground.python.exists()
    assert Path(ground.at.env, "conda-meta/history").read_text() == environment.explicit_list("")
    assert not Path(f"{ground.at.conda}.sh").exists()
    installed = Path(ground.at.conda, "conda-meta/history").stat().st_mtime_ns
    ground.run(python_env.interpreter_commands(wanted, ground.at))
    assert Path(ground.at.conda, "conda-meta/history").stat().st_mtime_ns == installed


def test_another_conda_is_not_taken_for_the_wanted_one(
    ground: Ground, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other_stand_in"
    other.write_text(STAND_IN.read_text().replace("installed by a stand-in", "installed by another"))
    wanted = ground.wanted(provider="conda")
    ground.run(python_env.interpreter_commands(wanted, ground.at))
    pin(monkeypatch, other)
    ground.run(python_env.interpreter_commands(wanted, ground.at))
    assert Path(ground.at.conda, "conda-meta/history").read_text() == "installed by another\n"


def test_an_environment_stays_while_its_conda_cannot_be_had(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, STAND_IN, "0" * 64)
    ground.python.parent.mkdir(parents=True)
    ground.python.write_text("the old one")
    with pytest.raises(AssertionError, match=r"(?s)pinned sha256.*\[mirrors\] miniforge.*\[python\] provider"):
        ground.run(python_env.interpreter_commands(ground.wanted(provider="conda"), ground.at))
    assert ground.python.read_text() == "the old one"


def test_a_half_installed_stand_in_conda_is_installed_again(ground: Ground, stand_in: Path) -> None:
    Path(ground.at.conda, "bin").mkdir(parents=True)
    Path(ground.at.conda, "bin/conda").write_text("half")
    ground.run(python_env.interpreter_commands(ground.wanted(provider="conda"), ground.at))
    assert ground.python.exists()


def test_an_installer_with_another_sha256_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, STAND_IN, "0" * 64)
    at = EnvPaths(conda=str(tmp_path / "conda"))
    with pytest.raises(AssertionError, match=f"no {STAND_IN.name} with the pinned sha256 at {STAND_IN.as_uri()}"):
        Ground(at, "").run(iter([environment.install_command([STAND_IN.as_uri()], at.conda)]))
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_without_the_installer_gives_way_to_its_own_release(tmp_path: Path, stand_in: Path) -> None:
    at = EnvPaths(conda=str(tmp_path / "conda"))
    urls = environment.installer_urls(f"{tmp_path.as_uri()}/mirror")
    assert len(urls) == 2
    Ground(at, "").run(iter([environment.install_command(urls, at.conda)]))
    assert (tmp_path / "conda/bin/conda").exists()


def test_mirrors_are_asked_first() -> None:
    settings = Settings(mirrors=Mirrors(preset="china"), python=Python(provider="conda", torch="cuda"))
    wanted = python_env.environment_from(settings, LOCK)
    urls = environment.installer_urls(wanted.mirrors.miniforge)
    assert urls[0].startswith("https://mirrors.tuna.tsinghua.edu.cn/github-release/conda-forge/miniforge/Release%20")
    assert urls[1].startswith("https://github.com/conda-forge/miniforge/releases/download/")
    condarc = environment.condarc(wanted.mirrors.conda)
    assert "conda-forge: https://mirrors.tuna.tsinghua.edu.cn/anaconda/cloud" in condarc
    lines = list(python_env.package_commands(wanted, EnvPaths(), complete_wheelhouse=False))
    assert all("--index-url https://mirrors.aliyun.com/pypi/simple/" in line for line in lines[:2])


def test_a_cpu_node_without_a_wheelhouse_takes_torch_from_the_cpu_index() -> None:
    wanted = python_env.environment_from(HERE, LOCK)
    lines = list(python_env.package_commands(wanted, EnvPaths(), complete_wheelhouse=False))
    assert lines[2].endswith("--torch-backend cpu torch==2.13.0")
    assert not any("--no-index" in line for line in lines)
    offline = list(python_env.package_commands(wanted, EnvPaths(), complete_wheelhouse=True))
    assert all("--no-index --find-links /opt/spotune/wheelhouse" in line for line in offline[:3])


@pytest.mark.parametrize("told", ["its own", "another"])
def test_without_a_hash_of_ours_uv_goes_by_the_one_in_the_index(tmp_path: Path, told: str) -> None:
    """What torch of a CPU node rests on: PyTorch's index gives a hash beside each name."""
    digest = wheel(tmp_path, "torch", "2.13.0+cpu", {"torch.py": ""}) if told == "its own" else "0" * 64
    wheel(tmp_path, "torch", "2.13.0+cpu", {"torch.py": ""})
    name = "torch-2.13.0+cpu-py3-none-any.whl"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text(f'<a href="/{name.replace("+", "%2B")}#sha256={digest}">{name}</a>')
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        argv = ["uv", "pip", "install", "--no-config", "--no-deps", "--target", str(tmp_path / "there")]
        argv = [sys.executable, "-m", *argv, "--python", sys.executable, "--default-index", index, "torch==2.13.0"]
        env = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        server.shutdown()
    came = (tmp_path / "there" / "torch.py").exists()
    assert ("Hash mismatch" in done.stderr, came) == (told == "another", told == "its own"), done.stderr


def test_a_cuda_node_installs_torch_by_hash_and_compiles_nothing() -> None:
    wanted = replace(python_env.environment_from(HERE, LOCK), flavour="cuda")
    assert len(list(python_env.package_commands(wanted, EnvPaths(), complete_wheelhouse=False))) == 3
    assert "torch==2.13.0 \\\n    --hash" in python_env.package_lists(wanted)["packages.txt"]
    assert not any("ShareMemCommBuilder" in line for line in python_env.finishing_commands(wanted, EnvPaths()))


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        ({"flavour": "cuda"}, True),
        ({"provider": "conda"}, True),
        ({"lock": LOCK.replace("peft==0.21.2", "peft==0.21.3")}, True),
        ({"mirrors": Mirrors(pypi="https://mirror.example/simple")}, False),
    ],
)
def test_the_environment_is_built_again_only_for_what_changes_it(change: dict[str, Any], rebuilt: bool) -> None:
    wanted = python_env.environment_from(HERE, LOCK)
    assert (replace(wanted, **change).hash != wanted.hash) is rebuilt


def test_conda_installs_python_by_sha256_from_the_mirror() -> None:
    opening, *lines = environment.explicit_list("https://mirror.example/cloud/").splitlines()
    # how conda itself reads such a line: conda/misc.py, url_pat
    pattern = re.compile(r"https://mirror\.example/cloud/conda-forge/(linux-64|noarch)/[^/#]+\.conda#[0-9a-f]{64}")
    assert opening == "@EXPLICIT"
    assert all(pattern.fullmatch(line) for line in lines)
    assert {re.sub(r".*/|-[^-]+-[^-]+$", "", line) for line in lines} >= {"python", "pip", "openssl", "libffi"}
