"""A machine that goes while something is done with it is the error, whatever it looked like first."""

from types import SimpleNamespace

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.renting.machines import naming_gone
from inventory.ssh import SshError
from tests.test_snapshots_rebuild import machine

BOTH = tuple(machine(k) for k in (1, 2))


def cloud(*there, refuses=False):
    def instances(ids):
        if refuses:
            raise CloudError("no answer", Kind.PASSING)
        return tuple(each for each in there if each.instance_id in ids)

    return SimpleNamespace(instances=instances)


@pytest.mark.parametrize("error", [SshError("te2: timed out"), CloudError("there is no such thing", Kind.NOT_FOUND)])
def test_an_error_about_a_machine_that_is_gone_says_that_it_is_gone(error):
    with pytest.raises(CloudError, match=r"te2 went meanwhile .* run the same command again") as told:
        with naming_gone(cloud(BOTH[0]), BOTH):
            raise error
    assert told.value.kind is Kind.PASSING and told.value.__cause__ is error


@pytest.mark.parametrize("seen", [cloud(*BOTH), cloud(refuses=True)])
def test_any_other_error_stays_what_it_is(seen):
    with pytest.raises(SshError, match="te2: timed out"):
        with naming_gone(seen, BOTH):
            raise SshError("te2: timed out")
