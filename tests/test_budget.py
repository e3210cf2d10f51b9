"""How large the product may be, and what makes it hard to grasp.

Who takes something out lowers a figure. Who adds to a room moves its row in the same commit, whose message says why.
The other figures nobody raises.
"""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.test_layers import ROOT, SOURCES

ROOMS = {
    ".": (32, 1),
    "deploy": (1914, 21),
    "deploy/files": (25, 2),
    "deploy/on_node": (677, 7),
    "inventory": (1870, 27),
    "inventory/aliyun_ecs": (1010, 12),
    "inventory/cloud": (277, 6),
    "inventory/localcloud": (1138, 14),
    "inventory/localcloud/ecs": (1836, 16),
    "inventory/renting": (2640, 22),
    "snapshots": (1362, 12),
    "snapshots/on_node": (115, 3),
    "training": (0, 1),
    "training/cost": (789, 9),
    "training/data": (2514, 27),
    "training/data/look": (192, 4),
    "training/laptop": (5080, 33),
    "training/laptop/adapter": (581, 5),
    "training/laptop/on_head": (358, 4),
    "training/laptop/prove": (329, 4),
    "training/models": (772, 8),
    "training/node": (3106, 33),
    "training/node/adapter": (1065, 7),
    "training/node/diagnosis": (563, 7),
    "training/node/metrics": (612, 8),
    "training/node/prove": (376, 4),
    "training/node/strategies": (914, 11),
    "training/node/supervision": (1773, 18),
    "training/plan": (1377, 13),
    "training/recipe": (503, 7),
    "training/run": (1125, 14),
    "training/text": (393, 8),
}
"""Of a folder: statements at most, docstrings not counted, and files."""
FILE_LINES = 370
INNER_IMPORTS, MANY_PARAMETERS, SHELL, NAME_QUESTIONS, PROSE = 72, 6, 4, 0, 1285
"""Imports inside functions; functions of 8 parameters and more; places that ask the head in shell text; those that ask
which kind of model a name means, but for DOOR; asserts of tests on sentences."""
RECIPE_LINES = 150
PORT_METHODS = 22

TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in SOURCES}
DOOR = ("training/models/names.py", "training/recipe/base.py")
"""Where names of models come in; behind it they are values."""
QUESTION = re.compile(r"\b(?:is_folder|has_recipe)\(|\.(?:startswith|removeprefix)\([(\"]*(?:folder|built-in):")


def nodes(tree, *kinds):
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_each_room_keeps_its_size():
    statements, files = Counter(), Counter()
    for at, tree in SOURCES.items():
        room = str(Path(at).parent)
        files[room] += 1
        statements[room] += sum(not (isinstance(n, ast.Expr) and is_text(n.value)) for n in nodes(tree, ast.stmt))
    assert files.keys() == ROOMS.keys()
    larger = {
        room: (statements[room], files[room])
        for room, most in ROOMS.items()
        if statements[room] > most[0] or files[room] > most[1]
    }
    assert larger == {}


def test_what_makes_it_hard_to_grasp_becomes_no_more():
    functions = [each for tree in SOURCES.values() for each in nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)]
    inner = [one for each in functions for one in nodes(each, ast.Import, ast.ImportFrom)]
    parameters = [len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) for each in functions]
    tests = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")]
    asserts = [each for tree in tests for each in nodes(tree, ast.Assert)]
    prose = [each for each in asserts if any(is_text(n) and len(n.value.split()) >= 3 for n in ast.walk(each))]
    texts = TEXTS.values()
    assert max(text.count("\n") for text in texts) <= FILE_LINES
    assert len(inner) <= INNER_IMPORTS
    assert sum(count >= 8 for count in parameters) <= MANY_PARAMETERS
    assert sum(text.count("head.shell(") for text in texts) <= SHELL
    assert sum(len(QUESTION.findall(text)) for name, text in TEXTS.items() if name not in DOOR) <= NAME_QUESTIONS
    assert len(prose) <= PROSE


def test_a_class_name_means_one_thing():
    names = Counter(node.name for tree in SOURCES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_recipes_are_short():
    recipes = [ROOT / "training" / "models.toml", ROOT / "training" / "recipes" / "tiny.toml"]
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in recipes) <= RECIPE_LINES


def test_another_cloud_has_little_to_answer():
    port = next(node for node in SOURCES["inventory/cloud/port.py"].body if getattr(node, "name", "") == "Cloud")
    functions = [node for node in port.body if isinstance(node, ast.FunctionDef)]
    methods = [node.name for node in functions if not node.decorator_list]
    assert len(methods) <= PORT_METHODS
    double = (ROOT / "tests" / "support" / "memory_cloud.py").read_text(encoding="utf-8")
    assert double.count("\n") <= 200
