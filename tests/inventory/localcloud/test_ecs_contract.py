"""What is sent to the API, and what the local cloud takes, is what the vendor's description of it knows."""

import json

import pytest

import inventory.localcloud.ecs.server  # noqa: F401  (the actions register themselves)
from inventory.localcloud.ecs.actions import ACTIONS, CONTROL, ECS, STS, VPC, ApiError
from inventory.localcloud.ecs.api import FILE, check
from tests.support.ecs_description import parameters_of
from tests.support.ecs_samples import needs_samples

SERVED = {each for each in ACTIONS if each[0] != CONTROL}


def test_every_action_that_is_served_is_described():
    told = json.loads(FILE.read_text(encoding="utf-8"))
    assert {(version, name) for version in told for name in told[version]} == SERVED


@needs_samples
def test_the_local_clouds_table_is_the_vendors_description():
    assert json.loads(FILE.read_text(encoding="utf-8")) == parameters_of(SERVED)


@pytest.mark.parametrize(
    ("version", "action", "flat", "code"),
    [
        (ECS, "RunInstances", {"RegionId": "r", "Amount": "2", "DataDisk.1.Size": "40", "SpotPriceLimit": "1.5"}, ""),
        (ECS, "RunInstances", {"RegionId": "r", "SystemDisk.Size": "60", "ImageOptions.LoginAsNonRoot": "True"}, ""),
        (ECS, "RunInstances", {"RegionId": "r", "InstanceTyp": "x"}, "UnsupportedParameter"),
        (ECS, "RunInstances", {"RegionId": "r", "DataDisk.1.Sice": "40"}, "UnsupportedParameter"),
        (ECS, "RunInstances", {"RegionId": "r", "DataDisk.Size": "40"}, "UnsupportedParameter"),
        (ECS, "RunInstances", {"RegionId": "r", "Amount": "two"}, "InvalidParameter.Amount"),
        (ECS, "RunInstances", {"RegionId": "r", "SpotPriceLimit": "dear"}, "InvalidParameter.SpotPriceLimit"),
        (ECS, "RunInstances", {"Amount": "2"}, "MissingParameter.RegionId"),
        (ECS, "DeleteInstances", {"RegionId": "r", "InstanceId.1": "i-1", "Force": "True"}, ""),
        (ECS, "DeleteInstances", {"RegionId": "r", "InstanceId.1": "i-1", "Force": "yes"}, "InvalidParameter.Force"),
        (ECS, "DeleteInstances", {"RegionId": "r", "InstanceId": "i-1"}, "UnsupportedParameter"),
        (ECS, "DeleteInstances", {"RegionId": "r"}, "MissingParameter.InstanceId.N"),
        (
            ECS,
            "AuthorizeSecurityGroup",
            {"RegionId": "r", "SecurityGroupId": "s", "Permissions.1.IpProtocol": "TCP"},
            "",
        ),
        (ECS, "DescribeInstances", {"RegionId": "r", "Filter.1.Key": "CreationStartTime", "Filter.1.Value": "t"}, ""),
        (
            ECS,
            "TagResources",
            {"RegionId": "r", "ResourceType": "disk", "ResourceId.1": "d-1", "Tag.1.Key": "a", "Tag.2.Key": "b"},
            "MissingParameter.Tag.N.Value",
        ),
        (VPC, "CreateVSwitch", {"VpcId": "v", "ZoneId": "z"}, "MissingParameter.CidrBlock"),
        (STS, "GetCallerIdentity", {}, ""),
    ],
)
def test_a_call_that_the_vendor_does_not_describe_is_refused(version, action, flat, code):
    if not code:
        check(version, action, flat)
        return
    with pytest.raises(ApiError) as refused:
        check(version, action, flat)
    assert (refused.value.status, refused.value.code) == (400, code)
