"""Who may import whom: the house stays as the README draws it.

MAY says what of ours the modules of a folder may import, ONLY where alone something may be imported at all. A row is a
folder, what it may do, and why; a refusal says the reason.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from inventory.renting.workload import HandedOver

ROOT = Path(__file__).parent.parent
OURS = ("inventory", "deploy", "training", "snapshots")
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for path in [*(p for folder in OURS for p in sorted((ROOT / folder).rglob("*.py"))), ROOT / "fabfile.py"]
}


@dataclass(frozen=True)
class May:
    """Of our modules, the files `where` (shell patterns; `*` stands for folders too) may import these and no others."""

    where: tuple[str, ...]
    may: tuple[str, ...]
    why: str
    may_not: tuple[str, ...] = ()
    """Parts of what they may."""


LADDER = ("text", "run", "recipe", "cost", "models", "data", "plan")
"""The rooms of training/ that its node and its laptop share."""

MAY = (
    # The last row that fits a file is the one that holds for it.
    May(
        ("inventory/*",),
        ("inventory", "training.text"),
        "every other folder asks it which machines there are: it asks none; amounts of money, misspelt keys and other "
        "texts look the same everywhere",
    ),
    May(
        tuple(f"inventory/cloud/{name}.py" for name in ("port", "values", "errors", "pace")),
        ("inventory.cloud.values", "inventory.cloud.errors", "inventory.cloud.pace", "inventory.errors"),
        "a test double and the next vendor are written against these files alone: no vendor, no settings",
    ),
    May(
        ("deploy/*",),
        (
            "deploy",
            "inventory",
            "training.text",
            "training.models",
            "training.recipe",
            "training.run.environment",
            "training.run.events",
            "training.run.launch",
            "training.run.notices",
        ),
        "a deploy prepares machines for training and knows its names, records and models, not how it learns",
    ),
    May(
        ("snapshots/*",),
        ("snapshots", "inventory", "training.text"),
        "a disk is put away and brought back whatever lies on it; but counts, sizes and money are said alike",
    ),
    *(
        May(
            (f"training/{room}/*",),
            tuple(f"training.{each}" for each in LADDER[: place + 1]),
            "a room imports those before it on the ladder alone: it can be understood without those after it, and is "
            "shipped to the nodes, where nothing else of ours is",
        )
        for place, room in enumerate(LADDER)
    ),
    May(
        ("training/node/*",),
        ("training",),
        "it is shipped to the nodes, where neither the laptop's room nor the other folders are",
        may_not=("training.laptop",),
    ),
    May(
        ("training/laptop/*",),
        ("training", "inventory"),
        "it stays on the user's machine; what the nodes have too lies above both rooms",
        may_not=("training.node",),
    ),
    May(
        ("training/laptop/on_head/*",),
        ("training.laptop.on_head",),
        "it is sent to heads that have nothing else of ours",
    ),
    May(
        ("training/node/diagnosis/*",),
        ("training",),
        "what a run costs it asks training/cost, as the plan does",
        may_not=("training.plan", "training.laptop"),
    ),
    May(("fabfile.py",), OURS, "it is the map of all tasks, and hands them what they ask of each other's work"),
)

ONLY = (
    # (libraries or modules of ours, where alone they may be imported, why)
    (("pyinfra",), ("deploy/*",), "it changes the standard library under whoever imports it: a process of its own"),
    (
        ("fabric", "invoke"),
        ("*/tasks.py", "*/list_tasks.py", "fabfile.py", "inventory/ssh.py", "inventory/command_line.py"),
        "what is no task takes and gives values; connections are opened in one place, which verifies host keys",
    ),
    (
        ("alibabacloud_ecs20140526", "alibabacloud_tea_openapi", "alibabacloud_credentials", "darabonba", "Tea"),
        ("inventory/aliyun_ecs/sdk.py",),
        "the vendor's SDK is slow to import and has one user",
    ),
    (
        ("apprise",),
        ("inventory/notify_services.py",),
        "it is slow to import, optional, and logs the secrets in its addresses unless it is silenced first",
    ),
    (
        ("inventory.aliyun_ecs",),
        ("inventory/aliyun_ecs/*", "inventory/cloud/opening.py"),
        "ask inventory/cloud/port.py; which vendor answers says inventory/cloud/opening.py alone",
    ),
    (
        ("inventory.localcloud",),
        ("inventory/localcloud/*", "inventory/tasks.py"),
        "it stands in for a cloud: what works against a real one needs nothing of it; where it answers says "
        "inventory/local_address.py",
    ),
    (
        ("torch", "deepspeed", "transformers", "peft"),
        ("training/node/*", "training/data/*", "training/models/tiny.py", "deploy/files/*"),
        "only the nodes have them: who imports them is shipped there",
    ),
)


def imports(tree):
    """Full names of what is imported: of `from a import b` a.b. A relative import counts as one of nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" if not node.level else "." for alias in node.names)


def within(name, modules):
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def fits(at, where):
    return any(fnmatch(at, pattern) for pattern in where)


def test_tasks_are_handed_what_they_ask_of_other_folders():
    attributes = [n for tree in SOURCES.values() for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    asked = {n.attr for n in attributes if isinstance(n.value, ast.Attribute) and n.value.attr == "spotune"}
    assert {field.name for field in fields(HandedOver)} == asked


def test_each_module_has_a_row():
    assert [
        at for at in SOURCES if not at.endswith("__init__.py") and not any(fits(at, row.where) for row in MAY)
    ] == []


def not_allowed(row, sources):
    """What the files for which this row of MAY holds import and may not."""
    for at, tree in sources.items():
        if next((other for other in reversed(MAY) if fits(at, other.where)), None) is row:
            for name in imports(tree):
                ours = within(name, OURS) or name == "."
                if ours and (not within(name, row.may) or within(name, row.may_not)):
                    yield f"{at} imports {name}"


def out_of_place(modules, where, sources):
    for at, tree in sources.items():
        if not fits(at, where):
            yield from (f"{at} imports {name}" for name in imports(tree) if within(name, modules))


def refuse(wrong, why):
    assert not (wrong := list(wrong)), f"{', '.join(wrong)}: {why}"


@pytest.mark.parametrize("row", MAY, ids=lambda row: row.where[0])
def test_a_folder_imports_only_what_it_may(row):
    refuse(not_allowed(row, SOURCES), row.why)


@pytest.mark.parametrize(("modules", "where", "why"), ONLY, ids=lambda value: value[0])
def test_what_has_its_place_is_imported_there_alone(modules, where, why):
    refuse(out_of_place(modules, where, SOURCES), why)


def test_every_row_is_about_something_that_is_there():
    patterns = [pattern for row in MAY for pattern in row.where] + [p for _, where, _ in ONLY for p in where]
    assert [pattern for pattern in patterns if not any(fits(at, (pattern,)) for at in SOURCES)] == []
    named = {name for row in MAY for name in (*row.may, *row.may_not)} | {n for m, _, _ in ONLY for n in m}
    paths = [ROOT / name.replace(".", "/") for name in named if within(name, OURS)]
    assert [path for path in paths if not path.is_dir() and not path.with_suffix(".py").is_file()] == []


def test_no_modules_import_each_other_in_a_circle():
    modules = {at.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for at, tree in SOURCES.items()}

    def imported(tree):
        return {name if name in modules else name.rpartition(".")[0] for name in imports(tree)} & modules.keys()

    TopologicalSorter({name: imported(tree) - {name} for name, tree in modules.items()}).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("at", "line"),
    [
        ("inventory/nodes.py", "import deploy.tasks"),
        ("inventory/cloud/port.py", "from inventory import settings"),
        ("deploy/survey.py", "from training import plan"),
        ("snapshots/create.py", "from training.run.launch import Launch"),
        ("training/run/launch.py", "from inventory.nodes import Node"),
        ("training/laptop/fetch.py", "from training.node import finetune"),
        ("training/node/finetune.py", "from inventory import ssh"),
        ("training/node/diagnosis/hang.py", "def late():\n    from training import plan"),
        ("training/run/launch.py", "from . import recipe"),
        ("inventory/renting/up.py", "from inventory import aliyun_ecs"),
        ("snapshots/create.py", "import pyinfra.api"),
        ("training/recipe/reading.py", "from training.cost import shape"),
        ("training/run/launch.py", "import fabric"),
        ("deploy/on_node/probe.py", "import torch"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(at, line):
    sources = {at: ast.parse(line)}
    found = [*(wrong for row in MAY for wrong in not_allowed(row, sources))]
    found += [wrong for modules, where, _ in ONLY for wrong in out_of_place(modules, where, sources)]
    assert found and found[0].startswith(f"{at} imports ")


@pytest.mark.parametrize(
    ("wanted", "heavy"),
    [
        ("training.plan.predict, training.cost.strategies", ["torch", "deepspeed", "transformers", "numpy"]),
        ("fabfile", ["torch", "pyinfra", "deepspeed", "alibabacloud_tea_openapi", "pydantic", "rich"]),
    ],
    ids=["the plan and the costs", "the map of tasks"],
)
def test_what_is_asked_often_imports_nothing_heavy(wanted, heavy):
    code = f"import sys, {wanted}\nprint(sorted({heavy} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


NOT_IN_3_10 = "import datetime, hashlib; del datetime.UTC, hashlib.file_digest; sys.modules['tomllib'] = None"


@pytest.mark.parametrize(
    ("words", "hidden"),
    [("standard library only", ""), ("standard library only, python 3.10", NOT_IN_3_10)],
    ids=["the standard library", "that of Python 3.10"],
)
def test_what_says_which_library_is_enough_imports_nothing_else(words, hidden):
    """A node's own Python has no more: by it the processes of a run are ended where the environment is gone."""
    documented = {at: " ".join((ast.get_docstring(tree) or "").lower().split()) for at, tree in SOURCES.items()}
    saying = [at for at, text in documented.items() if words in text]
    assert "training/node/supervision/end_processes.py" in saying
    modules = [at.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for at in saying]
    code = f"import sys\n{hidden}\nsys.path.insert(0, {str(ROOT)!r})\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def constants(tree, is_one):
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and is_one(n.value)]


def test_only_its_own_modules_know_a_strategys_name():
    where = (
        "training/cost/strategies.py",
        "training/node/strategies/registry.py",
        "training/node/prove/*",
        "training/recipe/recipe.py",
        "training/recipe/strategy_rules.py",
    )
    why = (
        "a new strategy would be added in a dozen places; the engine's table, the proof's short list and the "
        "recipe's list name them"
    )
    names = {"zero0", "zero1", "zero2", "zero3"}
    rest = {at: tree for at, tree in SOURCES.items() if not fits(at, where)}
    refuse((f"{at}:{line}" for at, tree in rest.items() for line in constants(tree, names.__contains__)), why)


def test_only_the_ssh_module_opens_connections():
    def calls(tree):
        found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return {getattr(called, "id", getattr(called, "attr", "")) for called in found}

    openers = [at for at, tree in SOURCES.items() if "Connection" in calls(tree)]
    assert openers == ["inventory/ssh.py"], "there host keys are verified, and nothing is accepted on first sight"


NAMES = [repr(name) for name in ("aliyun", "static", "local")]


def test_only_the_settings_know_providers_by_name():
    """Nobody else holds a provider's name against something, or spells its inventory file."""

    def lines(tree):
        compared = [side for n in ast.walk(tree) if isinstance(n, ast.Compare) for side in (n.left, *n.comparators)]
        for each in compared:
            text = ast.unparse(each)
            if text in NAMES or text.endswith("settings.provider"):
                yield each.lineno
        yield from constants(tree, lambda value: isinstance(value, str) and "inventory/aliyun.py" in value)

    rest = {at: tree for at, tree in SOURCES.items() if at not in ("inventory/settings.py", "inventory/aliyun.py")}
    why = "ask the settings: is_rented, is_listed, on_this_machine, inventory, deploy_command"
    refuse((f"{at}:{line}" for at, tree in rest.items() for line in lines(tree)), why)


def test_renting_and_snapshots_name_no_vendor():
    where = ("inventory/renting/*", "inventory/cloud/*", "snapshots/*")
    asked = [at for at in SOURCES if fits(at, where) and at != "inventory/cloud/opening.py"]
    named = [at for at in asked if "aliyun" in (ROOT / at).read_text(encoding="utf-8").lower()]
    refuse(named, "a vendor's table is settings.rental, a key of it rental.key(...)")
