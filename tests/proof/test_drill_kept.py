"""Each fault of the cloud at each call of fab snapshots.create, and of fab up where a disk waits."""

from tests.support.drill_cases import assert_harmless, assert_page_is_true, drill, each, each_kind  # noqa: F401
from tests.support.drill_plan import COMMANDS

HERE = [command for command in COMMANDS if command.name in ("fab up, with a kept disk", "fab snapshots.create")]


@each_kind
@each(HERE)
def test_a_fault_at_any_call_does_no_harm(drill, command, kind):  # noqa: F811
    assert_harmless(drill, command, kind)


@each(HERE)
def test_the_page_shows_what_came_of_it(drill, command):  # noqa: F811
    assert_page_is_true(drill, command)
