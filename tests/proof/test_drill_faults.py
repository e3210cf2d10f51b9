"""Each fault of the cloud at each call of fab up and fab down: nothing twice, nothing lost, a sentence."""

import time

from tests.support.drill_cases import assert_harmless, assert_page_is_true, drill, each, each_kind  # noqa: F401
from tests.support.drill_plan import COMMANDS

HERE = [command for command in COMMANDS if command.name in ("fab up", "fab down --disks")]


@each_kind
@each(HERE)
def test_a_fault_at_any_call_does_no_harm(drill, command, kind):  # noqa: F811
    assert_harmless(drill, command, kind)


@each(HERE)
def test_the_page_shows_what_came_of_it(drill, command):  # noqa: F811
    assert_page_is_true(drill, command)


def test_fab_up_tells_the_head_until_when_it_is_rented(drill):  # noqa: F811
    drill.begin(HERE[0])
    drill.ssh.told.clear()
    assert drill.run(HERE[0]).code == 0
    head = next(i for i in drill.world.instances.values() if i.name == "drill-te1")
    ((address, command),) = drill.ssh.told
    assert address == head.address
    assert time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(head.release_at)) in command
