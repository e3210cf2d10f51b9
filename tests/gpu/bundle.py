"""Fills the ignored folder .gpu/ with what a machine with a card and no network needs: `make gpu-bundle`.

Wheels for Python 3.12 beside torch 2.11 (wheels.txt), and the tiny model. Run again, it fetches only what has changed.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / ".gpu"
WHEELS = Path(__file__).with_name("wheels.txt")
LIMIT = 64 << 20
"""Bytes of .gpu/ and the tracked files together."""
SOURCE_ARCHIVES = {"deepspeed", "rouge-score"}
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc 2 that wheels for Linux are named after."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]
LEFT_OUT = re.compile(r"libbitsandbytes_(?!cuda130|cpu).*\.so$")
MAKE_TINY = """
import os
from pathlib import Path
from training.laptop.base_model import here_base_model
from training.laptop.open_cluster import launch_here
from training.models.names import load_recipe
run = Path("runs/prove-20260101-000000").absolute()  # never made
here_base_model(load_recipe("tiny"), launch_here(run, "", os.environ["PATH"], Path.home()))
"""


def pins(text: str) -> dict[str, str]:
    """Versions by name, of lines NAME==VERSION."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def wheel(folder: Path, name: str, version: str) -> Path | None:
    beginning = f"{name}-{version}-".replace("-", "_").lower()
    return next(
        (path for path in folder.glob("*.whl") if path.name.replace("-", "_").lower().startswith(beginning)), None
    )


def fetch(folder: Path, name: str, version: str) -> None:
    pip, pin = [sys.executable, "-m", "pip"], f"{name}=={version}"
    if name in SOURCE_ARCHIVES:
        words = ["wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", str(folder), pin]
    else:
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        words += ["--implementation=cp", *(f"--platform={each}" for each in PLATFORMS), "--dest", str(folder), pin]
    subprocess.run([*pip, *words], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    if name == "bitsandbytes" and (whole := wheel(folder, name, version)):
        without_libraries(whole)


def without_libraries(whole: Path) -> None:
    """The wheel without its libraries for other versions of CUDA."""
    smaller = whole.with_suffix(".smaller")
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            if not LEFT_OUT.search(member.filename):
                new.writestr(member, old.read(member))
    smaller.replace(whole)


def fill(folder: Path) -> None:
    """Exactly the wheels of wheels.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pins(WHEELS.read_text(encoding="utf-8"))
    for name, version in wanted.items():
        if wheel(folder, name, version) is None:
            print(f"fetching {name} {version}", flush=True)
            fetch(folder, name, version)
    current = {wheel(folder, name, version) for name, version in wanted.items()}
    for path in set(folder.iterdir()) - current:
        path.unlink()


def make_tiny(home: Path) -> None:
    """The tiny model where spotune has its models in a home folder; made anew where it is missing or out of date."""
    subprocess.run([sys.executable, "-c", MAKE_TINY], check=True, cwd=ROOT, env=os.environ | {"HOME": str(home)})


def sizes() -> tuple[int, int]:
    """Bytes of the tracked files, and of the bundle."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = [ROOT / name for name in names.split("\0") if name]
    of_bundle = [path for path in BUNDLE.rglob("*") if path.is_file()]
    return tuple(sum(path.lstat().st_size for path in paths if path.exists()) for paths in (tracked, of_bundle))


def too_large(tracked: int, bundle: int, limit: int = LIMIT) -> str:
    """Why the bundle cannot be used; empty where it can."""
    total = tracked + bundle
    if total <= limit:
        return ""
    return f".gpu/ and the tracked files have {total / 1e6:.1f} MB together, more than the {limit / 1e6:.1f} MB allowed"


def main() -> int:
    fill(BUNDLE / "wheels")
    make_tiny(BUNDLE / "home")
    tracked, bundle = sizes()
    print(f".gpu/ {bundle / 1e6:.1f} MB, tracked files {tracked / 1e6:.1f} MB, of {LIMIT / 1e6:.1f} MB together")
    if reason := too_large(tracked, bundle):
        print(reason, file=sys.stderr)
        return 1
    print("Copy this folder with .gpu/ to the machine with the card (Python 3.12, torch 2.11), and run there: make gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
