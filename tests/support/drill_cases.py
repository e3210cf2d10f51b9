"""What a drill of some commands asserts; test_drill_*.py make tests of it, each of what takes a minute or two."""

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.support.drill import Drill
from tests.support.drill_page import part_of, section
from tests.support.drill_plan import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@pytest.fixture(scope="module")
def drill():
    with Drill() as drill:
        yield drill


def each(commands):
    return pytest.mark.parametrize("command", commands, ids=lambda command: command.name.replace(" ", "-"))


each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "-"))


def assert_harmless(drill, command, kind):
    """The fault at each call, and the command again: what is asked for at last, and never anything twice or lost."""
    cells = drill.column(command, kind)
    wrong = [f"{cell.call.action} {cell.call.nth}: {line}" for cell in cells for line in cell.problems]
    assert not wrong, "\n".join(wrong)


def assert_page_is_true(drill, command):
    made = section(command, drill.calls_of(command), drill.all_cells(command))
    written = part_of(PAGE.read_text(), command)
    differences = "\n".join(
        unified_diff(written.splitlines(), made.splitlines(), "written", "came out", lineterm="", n=0)
    )
    assert not differences, f"make it anew: python -m tests.support.drill_page > docs/faults.md\n{differences}"
