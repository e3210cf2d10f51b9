"""Each fault of the cloud at each call of fab rebuild, with a disk that was kept and one that is made apart."""

from tests.support.drill_cases import assert_harmless, assert_page_is_true, drill, each, each_kind  # noqa: F401
from tests.support.drill_plan import COMMANDS

HERE = [command for command in COMMANDS if command.name in ("fab rebuild",)]


@each_kind
@each(HERE)
def test_a_fault_at_any_call_does_no_harm(drill, command, kind):  # noqa: F811
    assert_harmless(drill, command, kind)


@each(HERE)
def test_the_page_shows_what_came_of_it(drill, command):  # noqa: F811
    assert_page_is_true(drill, command)
