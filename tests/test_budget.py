"""How large the product may be. A figure is lowered by whoever takes something out; nobody raises one."""

import ast
from collections import Counter

from tests.test_layers import ROOT, SOURCES

LINES, FILES, SHORT_FILES, INNER_IMPORTS = 57_334, 400, 56, 318
"""The aim: 44,000 lines, 280 files, 25 of them short, 80 imports inside functions."""
SHORT = 60
RECIPE_LINES = 150

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
