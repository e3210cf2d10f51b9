"""What a node says about itself, as one JSON object: `python3 -c THIS '{"names": [...]}'` on the node.

Standard library only, Python 3.10 or newer: it runs by whatever python3 the node has. It changes nothing.
The argument may hold: names (cluster names to resolve), ssh_to (names to log in to), ports ([first, end): two in a
row must be free), gpu_only (just the GPUs and their processes). listen ([port, word, seconds]): it only sends
the word to whoever connects to the port within that time; a port where nothing listens tells nothing of a firewall.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENVIRONMENT = Path("/data/env")
MODELS = Path("/data/models")
ENVIRONMENT_STAMP, MODEL_STAMP = "spotune-env.json", "spotune-model.json"
"""Written last into an environment and into a model's folder: they say what lies there."""
SSH_TIMEOUT_S = 8
RUN_UNIT = re.compile(r"^spotune-(.+-\d{8}-\d{6})\.service\b")
"""A run's unit ends with the time it was made; spotune has other units too."""
SPOT_WATCH = "spotune-spot-watch.service"
NOTICES = Path("/run/spotune/reclaim")
"""Where that unit writes NODE.json when the cloud takes the node back."""
RUN_FOLDER = re.compile(r"/data/runs/([A-Za-z0-9._-]+)")


def say(*argv: str, timeout_s: int = 20) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program; 127 where it is missing, 124 where it takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer in {timeout_s} s"
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def text(path: str | Path) -> str:
    """A file's text; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(path: Path) -> Any:
    """A JSON file; None where it is missing or half-written."""
    try:
        return json.loads(text(path))
    except ValueError:
        return None


def csv_rows(output: str) -> list[list[str]]:
    """The rows of an nvidia-smi answer in csv,noheader,nounits."""
    return [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.strip()]


def number(field: str) -> int | None:
    """An nvidia-smi number; None for "[N/A]", "[Insufficient Permissions]" and the like."""
    return int(field) if field.isdigit() else None


def gpu_processes(output: str) -> list[dict[str, Any]]:
    """`nvidia-smi --query-compute-apps=pid,used_memory`, one entry a process, memory over all its GPUs."""
    memory: dict[int, int | None] = {}
    for row in csv_rows(output):
        pid = number(row[0])
        if pid is None or len(row) < 2:
            continue
        used = number(row[1])
        memory[pid] = used if memory.get(pid) is None else (memory[pid] or 0) + (used or 0)
    return [{"pid": pid, "memory_mib": used} for pid, used in memory.items()]


def pci_gpus() -> int:
    """GPUs on the PCI bus, with or without a driver."""
    return sum(
        text(device / "vendor").strip() == "0x10de" and text(device / "class").startswith(("0x0300", "0x0302"))
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def process(pid: int) -> dict[str, Any]:
    """Whose a process is, how long it has run, what it runs.

    `start` (ticks after boot) tells it from a later process of the same number.
    """
    folder = Path(f"/proc/{pid}")
    stat = text(folder / "stat").rpartition(")")[2].split()
    cmdline = text(folder / "cmdline").replace("\0", " ").strip()
    try:
        cwd = str((folder / "cwd").readlink())
    except OSError:
        cwd = ""
    run = RUN_FOLDER.search(f"{cmdline} {cwd} {text(folder / 'environ')}")
    code, user_and_age, _ = say("ps", "-o", "user:32=,etime=", "-p", str(pid))
    user, age = (user_and_age.split() if code == 0 else ["", ""])[:2]
    return {
        "user": user,
        "age": age,
        "command": cmdline,
        "start": stat[19] if len(stat) > 19 else "",
        "run": run[1] if run else "",
    }


def gpu() -> dict[str, Any]:
    """The GPUs as PCI, the kernel, dpkg and nvidia-smi see them, and who uses them."""
    on_bus = pci_gpus()
    facts: dict[str, Any] = {"pci_gpus": on_bus, "smi_gpus": 0, "smi_error": "", "gpu_processes": []}
    loaded = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text("/proc/driver/nvidia/version"))
    facts["driver_loaded"] = loaded[1] if loaded else ""
    facts["driver_installed"] = say("modinfo", "-F", "version", "nvidia")[1] if on_bus else ""
    if not on_bus:
        return facts
    code, out, error = say("nvidia-smi", "--query-gpu=index", "--format=csv,noheader,nounits")
    if code != 0:
        facts["smi_error"] = (out or error).splitlines()[0] if out or error else f"exit code {code}"
        return facts
    facts["smi_gpus"] = len(csv_rows(out))
    query = "--query-compute-apps=pid,used_memory"
    _, out, _ = say("nvidia-smi", query, "--format=csv,noheader,nounits")
    facts["gpu_processes"] = [{**entry, **process(entry["pid"])} for entry in gpu_processes(out)]
    return facts


def active_runs() -> list[str]:
    """Runs whose unit is active on this node."""
    pattern = "spotune-*.service"
    _, out, _ = say("systemctl", "list-units", pattern, "--state=active,activating", "--plain", "--no-legend")
    return [match[1] for line in out.splitlines() if (match := RUN_UNIT.match(line.strip()))]


def torch_versions() -> tuple[str, str]:
    """torch's version and CUDA version, without importing it; empty where it is missing or for the CPU."""
    files = sorted(ENVIRONMENT.glob("lib/python3.*/site-packages/torch/version.py"))
    versions = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^']*)'", text(files[0]) if files else "", re.M))
    return versions.get("__version__", ""), versions.get("cuda", "")


def addresses(name: str) -> list[str]:
    """What a name resolves to, in order."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)))
    except OSError:
        return []


def log_in(name: str) -> dict[str, str]:
    """The host name that ssh finds there, or why it finds none."""
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    code, out, error = say("ssh", *options, name, "hostname", timeout_s=SSH_TIMEOUT_S)
    own_words = out.splitlines() or [""]  # its shell may greet before
    return {"host": own_words[-1]} if code == 0 else {"error": (error.splitlines() or [f"exit code {code}"])[-1]}


def free_ports(first: int, end: int) -> int | None:
    """The first of two free ports in a row, where a run meets; None where every pair is taken."""
    return next((port for port in range(first, end, 2) if port_free(port) and port_free(port + 1)), None)


def port_free(port: int) -> bool:
    """Whether a run could listen there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def clock_synchronised() -> bool | None:
    """Whether a time service keeps the clock; None where that is the host's business (a container)."""
    if say("systemd-detect-virt", "-cq")[0] == 0:
        return None
    code, out, _ = say("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    return out == "yes" if code == 0 else None


def free_gib(path: str) -> float:
    """Space an unprivileged program has left on the filesystem of this path."""
    return round(shutil.disk_usage(path).free / 2**30, 1) if Path(path).exists() else 0.0


def reclaim_at(folder: Path, name: str) -> str:
    """When the cloud takes this node back, in UTC; empty where it has said nothing."""
    notice = read_json(folder / f"{name}.json")
    return str(notice.get("at", "")) if isinstance(notice, dict) else ""


def node(names: list[str], ssh_to: list[str], ports: list[int]) -> dict[str, Any]:
    """Everything but the GPUs."""
    torch, cuda = torch_versions()
    stamp = read_json(ENVIRONMENT / ENVIRONMENT_STAMP)
    manifests = {path.parent.name: read_json(path) for path in MODELS.glob(f"*/{MODEL_STAMP}")}
    with ThreadPoolExecutor(max_workers=32) as pool:
        logins = dict(zip(ssh_to, pool.map(log_in, ssh_to)))  # noqa: B905
    return {
        "hostname": socket.gethostname(),
        "data_mounted": Path("/data").is_mount(),
        "data_free_gib": free_gib("/data"),
        "root_free_gib": free_gib("/"),
        "environment": (stamp or {}).get("hash", ""),
        "torch": torch,
        "torch_cuda": cuda,
        "models": {name: (manifest or {}).get("hash", "") for name, manifest in manifests.items()},
        "resolved": {name: addresses(name) for name in names},
        "logins": logins,
        "free_ports": free_ports(*ports),
        "clock_synchronised": clock_synchronised(),
        "spot_watch": say("systemctl", "is-active", SPOT_WATCH)[1],
        "reclaim_at": reclaim_at(NOTICES, socket.gethostname()),
    }


def listen(port: int, word: str, seconds: float) -> None:
    """Send a word to the first that connects."""
    with socket.create_server(("", port)) as listener:
        listener.settimeout(seconds)
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            return
        with caller:
            caller.sendall(word.encode())


def main() -> None:
    """Print the answer to the question in argv[1]."""
    question = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    if "listen" in question:
        listen(*question["listen"])
        return
    answer = {**gpu(), "active_runs": active_runs()}
    if not question.get("gpu_only"):
        answer |= node(question.get("names", []), question.get("ssh_to", []), question.get("ports", [0, 0]))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
