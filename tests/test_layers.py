"""Who may import whom: the house stays as the README draws it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("inventory", "deploy", "training", "snapshots")
ALLOWED = {
    "inventory": {"inventory"},
    "training": {"training"},
    "deploy": {
        "deploy",
        "inventory",
        "training.launch",
        "training.lineage",
        "training.recipe",
        "training.model_lock",
        "training.hub_access",
    },
    "snapshots": {"snapshots", "inventory"},
}
TASKS = {"inventory", "deploy", "training", "snapshots"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def modules():
    return [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path):
    folder = path.relative_to(ROOT).parts[0]
    allowed = TASKS if path.name == "tasks.py" else ALLOWED[folder]
    at = str(path.relative_to(ROOT))
    laptop = ("training/control/", "training/adapter/chat.py", "training/adapter/report.py")
    if at.startswith(laptop):
        allowed = allowed | {"inventory.shown"}
    ours = [name for name in imports(path) if name.split(".")[0] in FOLDERS]
    wrong = [name for name in ours if not any(name == a or name.startswith(a + ".") for a in allowed)]
    assert wrong == []


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_libraries_stay_where_they_belong(path):
    at = str(path.relative_to(ROOT))
    roots = {name.split(".")[0] for name in imports(path)}
    if not at.startswith("deploy/"):
        assert "pyinfra" not in roots
    if path.name != "tasks.py" and at not in ("inventory/ssh.py", "inventory/command_line.py"):
        assert not roots & {"fabric", "invoke"}
    if at != "inventory/aliyun_ecs/ecs.py":
        sdk = {"alibabacloud_ecs20140526", "alibabacloud_tea_openapi", "alibabacloud_credentials", "darabonba", "Tea"}
        assert not roots & sdk
    if not at.startswith("training/"):
        assert not roots & {"torch", "deepspeed", "transformers", "peft"}


@pytest.mark.parametrize(
    ("folder", "may_not"),
    [
        ("training/cost", {"training.plan", "training.diagnosis", "training.metrics", "training.strategies"}),
        ("training/plan", {"training.diagnosis", "training.control", "training.strategies"}),
        ("training/diagnosis", {"training.plan"}),
    ],
)
def test_what_a_run_costs_is_counted_in_one_place_that_asks_nobody(folder, may_not):
    """The plan, the engine, the report and the ladder ask training/cost; were it to ask them, there would be two."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(path)
        if any(name == other or name.startswith(f"{other}.") for other in may_not)
    ]
    assert wrong == []


def test_the_plan_and_the_costs_need_no_torch():
    code = (
        "import sys, training.plan.predict, training.cost.strategies\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_only_its_own_modules_know_a_strategys_name():
    """Else a new strategy is added in a dozen places. The engine's table, the proof's short list and the recipe's list
    name them."""
    named = ("training/cost/strategies/", "training/strategies/__init__.py", "training/prove/", "training/recipe.py")
    wrong = [
        f"{at}:{node.lineno}"
        for path in modules()
        if not (at := str(path.relative_to(ROOT))).startswith(named)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in {"zero0", "zero1", "zero2", "zero3"}
    ]
    assert wrong == []


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_vendor_stands_behind_the_port(path):
    at = str(path.relative_to(ROOT))
    if at.startswith("inventory/aliyun_ecs/") or at == "inventory/cloud/opening.py":
        return
    named = [name for name in imports(path) if name.startswith("inventory.aliyun_ecs")]
    assert named == [], "ask inventory/cloud/port.py; which vendor answers says inventory/cloud/opening.py alone"


@pytest.mark.parametrize("name", ["port", "values", "errors", "pace"])
def test_the_port_itself_knows_no_vendor_and_no_settings(name):
    ours = [each for each in imports(ROOT / f"inventory/cloud/{name}.py") if each.split(".")[0] in FOLDERS]
    wrong = [each for each in ours if not each.startswith(("inventory.cloud.", "inventory.errors"))]
    assert wrong == [], "a test double and the next vendor are written against these files alone"


def test_the_map_of_tasks_is_drawn_without_heavy_imports():
    code = (
        "import sys, fabfile\n"
        "heavy = {'torch', 'pyinfra', 'deepspeed', 'alibabacloud_ecs20140526', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_only_the_ssh_module_opens_connections():
    for path in modules():
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = {getattr(call.func, "id", getattr(call.func, "attr", "")) for call in calls}
        if str(path.relative_to(ROOT)) != "inventory/ssh.py":
            assert "Connection" not in names, path


def provider_strings(path):
    """Lines that hold a provider's name against something, or spell its inventory file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(each, ast.Constant) and each.value in ("aliyun", "static", "local") for each in sides):
                yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "inventory/aliyun.py" in node.value:
            yield node.lineno


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_settings_know_providers_by_name(path):
    if str(path.relative_to(ROOT)) in ("inventory/settings.py", "inventory/aliyun.py"):
        return
    why = "ask the settings: is_rented, is_listed, on_this_machine, deploy_command"
    assert list(provider_strings(path)) == [], why


@pytest.mark.parametrize("folder", ["inventory/renting", "inventory/cloud", "snapshots"])
def test_renting_and_snapshots_name_no_vendor(folder):
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.name != "opening.py":
            text = path.read_text(encoding="utf-8").lower()
            assert "aliyun" not in text, f"{path}: a vendor's table is settings.rental, a key of it rental.key(...)"
