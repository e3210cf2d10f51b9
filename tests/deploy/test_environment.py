"""The lock beside the deploy, read for CUDA and for CPU nodes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import environment

UV = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
"""Beside the Python that runs the tests, whose environment need not be on the PATH."""
LOCK = (Path(__file__).parents[2] / "deploy/requirements.lock").read_text()
SMALL = """\
# made by a tool
cuda-bindings==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:aa
    # via torch
nvidia-cublas==13.1 \\
    --hash=sha256:bb
torch==2.13.0 \\
    --hash=sha256:cc
    # via -r requirements.in
tqdm==4.70 ; sys_platform == 'linux' \\
    --hash=sha256:dd \\
    --hash=sha256:ee
triton==3.7 \\
    --hash=sha256:ff
"""


def test_a_cuda_node_gets_the_whole_lock_with_every_hash() -> None:
    text = environment.hashed_requirements(SMALL, "cuda")
    assert text.count("--hash=") == SMALL.count("--hash=")
    assert [line.split("==")[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "cuda-bindings",
        "nvidia-cublas",
        "torch",
        "tqdm",
        "triton",
    ]


def test_a_cpu_node_gets_the_rest_hashed_and_torch_by_its_version() -> None:
    assert environment.hashed_requirements(SMALL, "cpu") == (
        "tqdm==4.70 ; sys_platform == 'linux' \\\n    --hash=sha256:dd \\\n    --hash=sha256:ee\n"
    )
    assert environment.torch_pin(SMALL) == "torch==2.13.0"
    assert environment.cpu_requirements(SMALL) == "tqdm==4.70 ; sys_platform == 'linux'\ntorch==2.13.0\n"


def test_comments_do_not_change_the_hash_and_pins_do() -> None:
    assert environment.lock_hash(SMALL) == environment.lock_hash(SMALL.replace("# made by a tool\n", ""))
    assert environment.lock_hash(SMALL) != environment.lock_hash(SMALL.replace("sha256:dd", "sha256:d0"))
    assert environment.lock_hash(SMALL) != environment.lock_hash(SMALL.replace("2.13.0", "2.14.0"))


def test_every_package_of_our_lock_is_pinned_by_hash() -> None:
    entries = dict(environment.requirements(LOCK))
    assert len(entries) > 60
    assert [name for name, text in entries.items() if "--hash=sha256:" not in text] == []


def test_our_lock_holds_what_belongs_together() -> None:
    pins = {name: text.splitlines()[0].split("==")[1].split()[0] for name, text in environment.requirements(LOCK)}
    versions = {name: pins[name] for name in ("torch", "deepspeed", "transformers", "peft")}
    assert versions == {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "peft": "0.21.2"}
    assert "nvidia-nccl-cu13" in pins


def test_no_cuda_package_is_left_for_a_cpu_node() -> None:
    text = environment.cpu_requirements(LOCK)
    assert "nvidia" not in text
    assert "cuda" not in text
    assert "triton" not in text
    assert "deepspeed==0.19.8" in text


def _resolve(what: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What uv would install on a CUDA node, without a wheel being fetched."""
    argv = [str(UV), "pip", "install", "--dry-run", "--require-hashes", "--python-version", "3.11"]
    argv += ["--python-platform", "x86_64-manylinux_2_28", "--target", str(folder), "-r", str(what)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_the_whole_lock_resolves_on_a_cuda_node(tmp_path: Path) -> None:
    """Every pin exists with its hash and agrees with what the others ask for."""
    small = tmp_path / "small.txt"
    small.write_text(environment.one_requirement(LOCK, "wheel"))
    small.write_text(small.read_text() + environment.one_requirement(LOCK, "packaging"))
    if _resolve(small, tmp_path / "env").returncode:
        pytest.skip("no package index answers")
    whole = tmp_path / "lock.txt"
    whole.write_text(environment.hashed_requirements(LOCK, "cuda"))
    done = _resolve(whole, tmp_path / "env")
    assert done.returncode == 0, done.stderr
    would = {line.split()[1].split("==")[0] for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert {"torch", "triton", "liger-kernel", "deepspeed", "nvidia-nccl-cu13"} <= would
