"""How large the product may be. A figure is lowered by whoever takes something out; nobody raises one."""

import ast
from collections import Counter

from tests.test_layers import ROOT, SOURCES

LINES, FILES, SHORT_FILES, INNER_IMPORTS = 56_660, 331, 20, 80
"""The aim: 44,000 lines in 280 files. SHORT_FILES: of less than SHORT lines."""
SHORT = 60
RECIPE_LINES = 150
PORT_METHODS = 22

TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in SOURCES}


def test_lines_and_files():
    lines = {name: text.count("\n") for name, text in TEXTS.items()}
    modules = [name for name in lines if not name.endswith("__init__.py")]
    assert sum(lines.values()) <= LINES
    assert len(lines) <= FILES
    assert sum(lines[name] < SHORT for name in modules) <= SHORT_FILES


def test_a_class_name_means_one_thing():
    names = Counter(node.name for tree in SOURCES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_few_imports_stand_inside_functions():
    functions = [node for tree in SOURCES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = [node for each in functions for node in ast.walk(each) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(inner) <= INNER_IMPORTS


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
