"""What only a card can show, in one run on a machine with one: `make gpu`, or `python3 tests/gpu/hour.py`.

Runs the tests marked gpu, trains, resumes, asks and merges the tiny model, runs `fab prove`, and measures a model of
Qwen2.5-7B's shape against its plan and against plain transformers + PEFT. Each step is a process of its own with a time
limit; a step begins only where those after it keep the seconds they need. README.md beside this says how to read the
summary. This file needs Python's standard library alone; a step that needs more imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUNDLE = ROOT / ".gpu"
NO_CARD = "make gpu needs an NVIDIA card and its driver: nvidia-smi lists none on this machine"
MARK, ENDS = "SPOTUNE_GPU_STEP", "SPOTUNE_GPU_ENDS"
SHORTEST_S = 8
"""A step with less than this is left out."""
LAST_S = 6
"""Of a step's time, what it needs after its longest command to read what that left."""
WARM_UP = 2
"""Steps of training that are not part of a median."""
NOT_COPIED = (".git", ".gpu", ".venv", ".spotune", "runs", "build", "data", ".*_cache")
NOT_EVIDENCE = ("training", "checkpoints", "adapter", "prepared", "merged")
LARGEST_EVIDENCE = 4 << 20
SMI = "timestamp,memory.used,utilization.gpu,clocks.sm,power.draw,temperature.gpu"
SMI_FORMAT = "--format=csv,noheader,nounits"
PACKAGES = ["torch", "triton", "transformers", "peft", "deepspeed", "bitsandbytes", "liger-kernel", "accelerate"]
PACKAGES += ["huggingface-hub", "tokenizers", "safetensors", "numpy", "pydantic", "fabric"]
ENGINE = ("finetune", "prove.walk", "adapter.merge", "nf4")
"""Of training.node; what these import is most of what a rank imports."""


class Failed(Exception):
    """A step has not done what it should have; the words are its row's."""


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hour.py", description="What only a card can show, in one run.")
    parser.add_argument("--limit", type=int, default=1200, help="seconds in all (1200)")
    parser.add_argument("--only", nargs="+", default=[], help="these steps alone, such as 5a 6b")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where results go (build/gpu)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/spotune-gpu"), help="where all else is made")
    parser.add_argument("--steps", type=int, default=12, help="of training the large model, in each run (12)")
    parser.add_argument("--layers", type=int, default=28, help="of the large model at most (28)")
    parser.add_argument("--small", action="store_true", help="small shapes, for a rehearsal")
    parser.add_argument("--slow", type=int, default=1, help="each step takes as many times its seconds, in a rehearsal")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--card", action="store_true", help="only say whether there is a card")
    return parser.parse_args(argv)


class Hour:
    """Places and shapes, the same in each process of the run."""

    def __init__(self, argv: list[str]):
        self.argv, self.asked = argv, parsed(argv)
        self.out, self.work = self.asked.out.absolute(), self.asked.work.absolute()
        self.state, self.home, self.site = self.work / "state", self.work / "home", self.work / "site"
        self.models = self.home / ".cache" / "spotune" / "models"
        self.large = self.work / "large" / "qwen7b-shape"
        small = self.asked.small
        self.short, self.long, self.rows, self.tokens = (256, 512, 4, 24_000) if small else (2048, 4096, 8, 230_000)

    def environ(self, mark: str) -> dict[str, str]:
        """Of a step: nothing leaves the machine, and what is written lies in its own home folder."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ALIBABA_", "HF_"))}
        path = [str(self.site), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"HOME": str(self.home), "PYTHONPATH": ":".join(path), "PYTHONUNBUFFERED": "1"}
        env |= {"TERM": "dumb", "COLUMNS": "150", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
        return env | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", MARK: mark}

    def newest(self, beginning: str) -> Path | None:
        """The newest run of copy a whose id begins so."""
        runs = [path for path in (self.work / "a" / "runs").glob(f"{beginning}-2*") if path.is_dir()]
        return max(runs, key=lambda path: path.stat().st_mtime, default=None)

    def python(self, *words: object, cwd: Path | None = None, **environ: str) -> int:
        """Runs it for as long as the step has."""
        argv, left = [sys.executable, *map(str, words)], float(os.environ[ENDS]) - time.time() - LAST_S
        with subprocess.Popen(argv, cwd=cwd, env=os.environ | environ) as process:
            try:
                return process.wait(max(left, 1))
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(2) or 124
                process.kill()
                return 124

    def fab(self, *words: object, copy: str = "a") -> int:
        return self.python("-m", "fabric", *words, cwd=self.work / copy)


def result(text: str) -> None:
    """Part of the step's row in the summary."""
    print(f"RESULT {text}", flush=True)


def check(code: int, what: str) -> None:
    if code:
        raise Failed(f"{what} ended with {code}")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


# --- the steps


def not_copied(folder: str, names: list[str]) -> set[str]:
    at_the_top = Path(folder) == ROOT
    patterns = ("__pycache__", *(NOT_COPIED if at_the_top else ()))
    return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}


def unpack(hour: Hour) -> None:
    """Packages, two copies of the checkout, the tiny model. Runs that a copy has stay there."""
    from bundle import make_tiny

    shutil.rmtree(hour.site, ignore_errors=True)
    copies = [hour.work / "a", hour.work / "b"]
    for copy in copies:
        shutil.copytree(ROOT, copy, symlinks=True, ignore=not_copied, dirs_exist_ok=True)
    wheels = [] if hour.asked.small else sorted((BUNDLE / "wheels").glob("*.whl"))
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(hour.site)
    if wheels:  # ranks write no bytecode
        hour.python("-m", "compileall", "-q", "-j", "0", hour.site, *copies)
    if (BUNDLE / "home").is_dir():
        shutil.copytree(BUNDLE / "home", hour.home, dirs_exist_ok=True)
    make_tiny(hour.home)
    result(f"{len(wheels)} wheels")


def versions(hour: Hour) -> None:
    for command in ("nvidia-smi", "nvidia-smi -L", "uname -r", "df -h /tmp /dev/shm", "gcc --version", "free -g"):
        subprocess.run(command, shell=True, check=False)
    from importlib.metadata import PackageNotFoundError, version

    print(sys.version)
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            print(name, version(name))
    began = time.monotonic()
    import torch

    sys.path.insert(0, str(hour.work / "a"))
    for name in ENGINE:
        import_module(f"training.node.{name}")
    from training.laptop.open_cluster import here_gpus

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    result(f"torch {torch.__version__} on {card}; the engine was imported in {time.monotonic() - began:.0f} s")
    if not (torch.cuda.is_available() and here_gpus()):
        raise Failed("torch or spotune sees no card, although nvidia-smi lists one")


def gpu_tests(hour: Hour) -> None:
    report = hour.state / "gpu_tests.xml"
    words = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/training/node/test_gpu.py", f"--junit-xml={report}")
    code = hour.python("-m", "pytest", *words, cwd=hour.work / "a")
    from xml.etree import ElementTree

    suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    failed, all_of_them = int(suite["failures"]) + int(suite["errors"]), int(suite["tests"])
    result(f"{all_of_them - failed - int(suite['skipped'])} of {all_of_them} tests passed")
    check(code, "pytest")


def last_step(run: Path) -> str:
    row = [row for row in lines_of(run / "metrics.jsonl") if "loss" in row][-1]
    return f"step {row['step']}, loss {row['loss']:.3f}, {row['step_s']:.2f} s a step, {row['memory_gib']:.2f} GiB"


def tiny_train(hour: Hour) -> None:
    check(hour.fab("train", "--model", "tiny", "--here", "--steps", 40), "fab train")
    result(last_step(hour.newest("tiny")))


def tiny_resume(hour: Hour) -> None:
    check(hour.fab("train", "--resume", "--force", "--steps", 60, "--here"), "fab train --resume")
    result(last_step(hour.newest("tiny")))


def tiny_generate(hour: Hour) -> None:
    question = "What does textwrap.dedent do?"
    check(hour.fab("generate", "--here", "--prompt", question, "--max-new-tokens", 40), "fab generate")
    result("both models have answered")


def tiny_merge(hour: Hour) -> None:
    check(hour.fab("merge", "--here"), "fab merge")
    weights = list((hour.newest("tiny") / "merged").glob("*.safetensors"))
    result(f"{sum(path.stat().st_size for path in weights) / 1e6:.1f} MB of merged weights")


def tiny_dpo(hour: Hour) -> None:
    for strategy in ("zero0", "zero2"):
        words = ("--model", "tiny", "--here", "--no-fetch", "--steps", 20, "--set", f"strategy={strategy}")
        check(hour.fab("train", *words, "--set", "goal=dpo"), f"fab train with {strategy}")
        result(f"{strategy}: {last_step(hour.newest('tiny'))}")


def prove(hour: Hour, *words: str) -> None:
    """Its failure drill is a run called prove-... too: the one with prove.json is meant."""

    def newest() -> Path | None:
        files = (hour.work / "a" / "runs").glob("prove-*/prove.json")
        return max(files, key=lambda path: path.stat().st_mtime, default=None)

    before = newest()
    code = hour.fab("prove", "--here", *words)
    for log in sorted((hour.work / "a" / "runs").glob("prove-*/logs/rank-0.log")):
        print(f"-- {log}\n{log.read_text(errors='replace')[-5000:]}")
    if (file := newest()) in (None, before):
        raise Failed(f"no prove.json: it ended with {code} before its first start was over")
    shutil.copy(file, hour.out / "prove.json")
    outcomes = json.loads(file.read_text(encoding="utf-8"))["outcomes"]
    for row in outcomes:
        print(f"{row['state']:9} {row['name']:40} {row['found'][:200]}")
    states = [row["state"] for row in outcomes]
    result(", ".join(f"{states.count(state)} {state}" for state in ("pass", "fail", "not here")))
    for row in outcomes:
        if row["state"] == "fail":
            result(f"{row['name']}: {row['found'][:110]}")
    check(code, "fab prove")


def prove_quick(hour: Hour) -> None:
    prove(hour, "--quick")


def large_words(hour: Hour, length: int, *words: str) -> tuple[object, ...]:
    """`fab train` of the large model with packed rows of that length, as many tokens a step with each."""
    settings = {
        "max_length": length,
        "strategy": "zero0",
        "global_batch": hour.rows * hour.short // length,
        "micro_batch": 1,
        "lora.rank": 16,
        "save_every": 1000,
        "optimizer.warmup_steps": 2,
        "logging.tensorboard": "false",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    data = hour.work / "conversations.jsonl"
    named = ("--model", hour.large, "--data", data, "--here", "--anyway", "--steps", hour.asked.steps)
    return ("train", *named, *sets, *words)


def train_large(hour: Hour, name: str, length: int, *words: str) -> None:
    before = hour.newest("qwen7b-shape")
    code = hour.fab(*large_words(hour, length, *words))
    run = hour.newest("qwen7b-shape")
    if run in (None, before):
        raise Failed(f"no run was begun: fab train ended with {code}")
    print((run / "logs" / "rank-0.log").read_text(errors="replace")[-3000:])
    link = hour.state / name
    link.unlink(missing_ok=True)
    link.symlink_to(run)
    compare_with_plan(run, name, hour.state / "numbers.json")
    check(code, "fab train")


PREDICTED = ["step_s", "model_step_s", "memory_gib", "parts", "correction", "rates", "chosen", "card", "own_loss"]
"""What is taken of plan.json."""


def compare_with_plan(run: Path, name: str, target: Path) -> None:
    """Predicted and measured, side by side, into one file for all runs."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))["predicted"]
    rows = [row for row in lines_of(run / "metrics.jsonl") if "loss" in row]
    warm = rows[WARM_UP:] or rows
    measured = {
        key: statistics.median(row[key] or 0 for row in warm) for key in ("step_s", "tokens_per_s", "mfu", "hfu")
    }
    measured |= {key: max(row[key] or 0 for row in rows) for key in ("memory_gib", "memory_reserved_gib")}
    measured |= {"steps": len(rows), "loss_first": rows[0]["loss"], "loss_last": rows[-1]["loss"]}
    keys = ("strategy", "micro_batch", "gradient_check", "global_batch", "max_length", "base_prec")
    recipe = [line for line in (run / "recipe.toml").read_text(encoding="utf-8").splitlines() if line.startswith(keys)]
    numbers = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    numbers[name] = {"predicted": {key: plan.get(key) for key in PREDICTED}, "measured": measured, "recipe": recipe}
    target.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    step_s, memory = measured["step_s"], measured["memory_gib"]
    planned_s = plan.get("model_step_s") or plan.get("step_s")
    ratio = f"predicted {planned_s:.2f}, ratio {planned_s / step_s:.2f}" if planned_s else "nothing predicted"
    result(f"{step_s:.2f} s a step ({ratio})")
    result(f"{measured['tokens_per_s']:.0f} tokens/s, mfu {measured['mfu']:.2f}")
    result(f"{memory:.2f} GiB (predicted {plan['memory_gib']:.2f}), {measured['memory_reserved_gib']:.2f} reserved")


def wait_for(hour: Hour, name: str, seconds: int) -> None:
    """A file of the process beside the steps."""
    until = time.time() + seconds * hour.asked.slow
    while not (hour.state / name).exists():
        if time.time() > until:
            raise Failed(f"{name} was not made in time")
        time.sleep(1)


def large_short(hour: Hour) -> None:
    wait_for(hour, "sums", 100)
    train_large(hour, "rows", hour.short)


def large_long(hour: Hour) -> None:
    wait_for(hour, "sums", 5)
    train_large(hour, "long-rows", hour.long)


def large_nf4(hour: Hour) -> None:
    wait_for(hour, "nf4", 60)
    train_large(hour, "nf4", hour.short, "--set", "base_precision=nf4")


def measured_beside(hour: Hour, script: str, *words: object, **environ: str) -> None:
    """A script of this folder, with the code and the rows of the first run of the large model."""
    run, out = (hour.state / "rows").resolve(), hour.state / f"{script}.json"
    path = f"{run}:{os.environ['PYTHONPATH']}"
    seconds = 45 * hour.asked.slow
    named = ("--run", run, "--out", out, "--seconds", seconds)
    environ |= {"PYTHONPATH": path, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    check(hour.python(HERE / f"{script}.py", *named, *words, cwd=run, **environ), script)


def engine(hour: Hour) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    measured_beside(hour, "engine", DS_ACCELERATOR="cuda", **rank)


def plain_loop(hour: Hour) -> None:
    recipe = (hour.state / "rows" / "recipe.toml").read_text(encoding="utf-8")
    again = ["--checkpointing"] if "\ngradient_checkpointing = true" in recipe else []
    measured_beside(hour, "plain_loop", "--model", hour.large, *again)


def large_model(hour: Hour) -> None:
    """Beside the steps that measure nothing: the large model, data, plan by the table of cards, four bits."""
    os.nice(5)
    b, data = hour.work / "b", hour.work / "conversations.jsonl"
    texts, longest = b / "training" / "models" / "tiny_text.json", hour.short - hour.short // 8
    check(hour.python(HERE / "conversations.py", texts, data, hour.tokens, longest), "conversations.py")
    words = ["--to", hour.large, "--seconds", 90, "--layers", hour.asked.layers, *["--small"] * hour.asked.small]
    check(hour.python(HERE / "large_model.py", "--tokenizer", hour.models / "tiny", *words), "large_model.py")
    print("== the plan by the table of cards", flush=True)
    check(hour.fab(*large_words(hour, hour.short, "--dry"), copy="b"), "fab train --dry")
    (hour.state / "sums").touch()
    sys.path.insert(0, str(b))
    import torch

    from training.node import nf4

    began = time.monotonic()
    nf4.ready(next(hour.models.glob("qwen7b-shape*")), torch.bfloat16)
    result(f"four bits made in {time.monotonic() - began:.1f} s")
    (hour.state / "nf4").touch()


@dataclass(frozen=True)
class Step:
    name: str
    title: str
    log: str
    most_s: int
    reserve_s: int
    """What the steps after it need."""
    work: Callable[[Hour], None]


BESIDE = Step("large", "the large model", "large", 400, 0, large_model)
STEPS = (
    Step("0", "packages, copies", "start", 150, 0, unpack),
    Step("1", "versions", "start", 90, 0, versions),
    Step("2", "pytest -m gpu", "start", 60, 320, gpu_tests),
    Step("3a", "tiny: train", "tiny", 75, 290, tiny_train),
    Step("3b", "tiny: resume", "tiny", 50, 270, tiny_resume),
    Step("3c", "tiny: generate", "tiny", 40, 255, tiny_generate),
    Step("3d", "tiny: merge", "tiny", 40, 245, tiny_merge),
    Step("4a", "fab prove --quick", "prove", 75, 200, prove_quick),
    Step("5a", "large: rows", "large", 130, 85, large_short),
    Step("5b", "large: long rows", "large", 60, 70, large_long),
    Step("5c", "large: four bits", "large", 90, 60, large_nf4),
    Step("6a", "engine: checkpointing, loss", "compare", 65, 5, engine),
    Step("6b", "transformers + PEFT", "compare", 65, 3, plain_loop),
    Step("4b", "fab prove", "prove", 240, 3, prove),
    Step("7", "DPO, zero0 and zero2", "tiny", 60, 3, tiny_dpo),
)
ALWAYS, PAUSED, UNTIL = ("0", "1"), ("5a", "5b"), "5c"
"""Steps that every run needs; those during which what runs beside is paused; the last beside which it runs."""


# --- the run


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Processes of a step with their command lines: ranks and their supervisor are in sessions of their own, where no
    signal to a group reaches them."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(path.parent.name), command.strip()


def send(mark: str, number: signal.Signals) -> None:
    for pid, _ in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def where_they_are(hour: Hour, mark: str) -> str:
    """What the ranks of a step that took too long are doing."""
    beside = [Path(sys.executable).with_name("py-spy"), *hour.site.glob("py_spy*.data/scripts/py-spy")]
    spy = next((path for path in beside if path.exists()), None)
    parts = []
    for pid, command in marked(mark):
        parts.append(f"still there: {pid} {command[:150]}")
        if spy and any(name in command for name in ("finetune", "walk", "commcheck")):
            spy.chmod(0o755) if hour.site in spy.parents else None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                dump = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=5)
                parts.append(dump.stdout[-3000:] + dump.stderr[-300:])
    return "\n".join(parts)


class Run:
    """The steps one after another, and their rows."""

    def __init__(self, hour: Hour):
        self.hour, self.began, self.rows = hour, time.time(), []

    def left(self) -> float:
        return self.hour.asked.limit - (time.time() - self.began)

    def start(self, step: Step, seconds: float, log: Path) -> subprocess.Popen:
        env = self.hour.environ(self.mark(step)) | {ENDS: str(time.time() + seconds)}
        argv = [sys.executable, str(HERE / "hour.py"), *self.hour.argv, "--step", step.name]
        with log.open("wb") as output:
            return subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT)

    def mark(self, step: Step) -> str:
        return f"{step.name}-{os.getpid()}"

    def row(self, state: str, seconds: float, step: Step, words: str) -> None:
        self.rows.append(
            {"state": state, "seconds": round(seconds), "step": step.name, "title": step.title} | {"result": words}
        )
        (self.hour.state / "rows.json").write_text(json.dumps(self.rows, indent=1), encoding="utf-8")
        self.keep()

    def step(self, step: Step) -> None:
        """Within its time, and leaving their seconds to those after it."""
        only, slow = self.hour.asked.only, self.hour.asked.slow
        if only and step.name not in (*only, *ALWAYS):
            return
        reserve = 3 if only else step.reserve_s * slow
        limit = min(self.left() - reserve, step.most_s * slow)
        if limit < SHORTEST_S:
            self.row("no time", 0, step, f"{self.left():.0f} s left, {reserve} of them for what follows")
            return
        began, part = time.time(), self.hour.state / f"{step.name}.log"
        print(f"{step.name} {step.title}: at {began - self.began:.0f} s, for {limit:.0f} s at most", flush=True)
        process, dump = self.start(step, limit, part), ""
        try:
            code = process.wait(limit)
            state = f"FAIL {code}" if code else "ok"
        except subprocess.TimeoutExpired:
            state, dump = "TIME OUT", where_they_are(self.hour, self.mark(step))
        finally:
            send(self.mark(step), signal.SIGKILL)
            process.wait()
        text = part.read_text(errors="replace") + dump
        with (self.hour.out / f"log-{step.log}.txt").open("a", encoding="utf-8") as log:
            log.write(f"\n===== {step.name} {step.title}: {state}, {time.time() - began:.0f} s\n{text}")
        self.row(state, time.time() - began, step, words_of(text))
        print(f"  {state}, {time.time() - began:.0f} s: {self.rows[-1]['result']}", flush=True)

    def keep(self) -> None:
        """What is worth keeping of the run folders, whatever happens later: their small files."""
        with tarfile.open(self.hour.out / "evidence.tgz", "w:gz") as archive:
            for folder in (self.hour.work / "a" / "runs", self.hour.work / "b" / "runs", self.hour.state):
                for path in sorted(folder.rglob("*")):
                    name = path.relative_to(self.hour.work)
                    if path.is_file() and not set(name.parts) & set(NOT_EVIDENCE) and not path.parent.is_symlink():
                        with contextlib.suppress(OSError):
                            if path.stat().st_size < LARGEST_EVIDENCE and path.suffix != ".safetensors":
                                archive.add(path, str(name))
        (self.hour.out / "summary.txt").write_text(self.summary(), encoding="utf-8")

    def all_steps(self) -> None:
        only, beside = self.hour.asked.only, None
        over = threading.Event()
        threading.Thread(target=self.watch, args=(over,), daemon=True).start()
        try:
            for step in STEPS:
                wanted = step.name not in ALWAYS and (not only or "5a" in only) and self.left() > SHORTEST_S
                if wanted and beside is None and not (self.hour.state / "nf4").exists():
                    beside = self.start(BESIDE, BESIDE.most_s * self.hour.asked.slow, self.hour.state / "large.log")
                made = (self.hour.state / "sums").exists()
                send(self.mark(BESIDE), signal.SIGSTOP if step.name in PAUSED and made else signal.SIGCONT)
                self.step(step)
                if step.name == UNTIL:
                    send(self.mark(BESIDE), signal.SIGKILL)
        finally:
            send(self.mark(BESIDE), signal.SIGKILL)
            over.set()
            if beside:
                code, text = beside.wait(), (self.hour.state / "large.log").read_text(errors="replace")
                self.row(f"FAIL {code}" if code else "ok", 0, BESIDE, words_of(text))
                with (self.hour.out / "log-large.txt").open("a", encoding="utf-8") as log:
                    log.write(f"\n===== beside the steps: the large model\n{text}")
            self.keep()

    def watch(self, over: threading.Event) -> None:
        """What nvidia-smi says, each second."""
        with (self.hour.state / "smi.csv").open("wb") as rows:
            while not over.wait(1):
                subprocess.run(["nvidia-smi", f"--query-gpu={SMI}", SMI_FORMAT], stdout=rows, check=False)

    def summary(self) -> str:
        state = self.hour.state
        lines = [
            f"{row['state']:9}{row['seconds']:5} s  {row['step']:6}{row['title']:28}{row['result']}"
            for row in self.rows
        ]
        for name in ("engine", "plain_loop"):
            if (state / f"{name}.json").exists():
                lines += [
                    f"== {name}",
                    *map(bench_line, json.loads((state / f"{name}.json").read_text(encoding="utf-8"))),
                ]
        smi = state / "smi.csv"
        used = [row.split(", ") for row in smi.read_text(errors="replace").splitlines()] if smi.exists() else []
        if memory := [float(fields[1]) for fields in used if len(fields) > 1 and fields[1].isdigit()]:
            lines.append(f"== nvidia-smi: {max(memory):.0f} MiB at most")
        return "\n".join([*lines, f"== {time.time() - self.began:.0f} s in all", ""])


def bench_line(row: dict) -> str:
    speed = f"{row['step_s']:.3f} s  {row['tokens_per_s']:8.0f} tokens/s  {row['peak_gib']:6.1f} GiB"
    return f"{row['name']:36}{speed}  first loss {row['loss_first']:.4f}"


def words_of(text: str) -> str:
    """A step's row: its results, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    return "; ".join(results or lines[-1:])[:700]


def has_card() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def main(argv: list[str]) -> int:
    hour = Hour(argv)
    if hour.asked.step:
        step = next(step for step in (*STEPS, BESIDE) if step.name == hour.asked.step)
        try:
            step.work(hour)
        except Failed as error:
            result(str(error))
            return 1
        return 0
    if not has_card():
        print(NO_CARD, file=sys.stderr)
        return 2
    if hour.asked.card:
        return 0
    for folder in (hour.out, hour.state, hour.home):
        folder.mkdir(parents=True, exist_ok=True)
    for log in hour.out.glob("log-*.txt"):
        log.unlink()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends with what it started, as after Ctrl-C
    run = Run(hour)
    run.all_steps()
    print(run.summary())
    return 0 if all(row["state"] == "ok" for row in run.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
