"""Roles of machines: attached and shown. The account has one role, made as docs/aliyun.md says."""

from __future__ import annotations

import json
from typing import Any

from inventory.localcloud.ecs import lifecycle
from inventory.localcloud.ecs.account import Instance
from inventory.localcloud.ecs.actions import ApiError, Cloud, Parameters, action

ROLE = "spotune-idle"
ROLE_ALLOWS = frozenset({"DescribeInstances", "ModifyInstanceAutoReleaseTime"})
"""What its own policy says."""
LONGEST_POLICY = 1024


def allowed(instance: Instance) -> frozenset[str]:
    """The actions a machine may call by its role: what both policies allow."""
    if not instance.ram_role:
        return frozenset()
    if not instance.role_policy:
        return ROLE_ALLOWS
    words = {
        word.removeprefix("ecs:")
        for statement in json.loads(instance.role_policy)["Statement"]
        for word in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
        if statement["Effect"] == "Allow"
    }
    return ROLE_ALLOWS & words


def _asked(cloud: Cloud, p: Parameters) -> list[Instance]:
    ids = p.json_strings("InstanceIds")
    if not ids:
        raise ApiError(400, "MissingParameter.InstanceIds", "The input parameter InstanceIds is mandatory.")
    return [lifecycle.instance(cloud, each) for each in ids]


@action("AttachInstanceRamRole")
def attach_role(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """One role a machine."""
    role, policy, found = p.needed("RamRoleName"), p.text("Policy"), _asked(cloud, p)
    if role != ROLE:
        raise ApiError(404, "InvalidRamRole.NotFound", 'The specified parameter "RAMRoleName" does not exist.')
    if len(policy) > LONGEST_POLICY or (policy and not _is_policy(policy)):
        raise ApiError(400, "InvalidParameter.Policy", "The specified Policy is not valid.")
    results = []
    for each in found:
        free = not each.ram_role
        if free:
            each.ram_role, each.role_policy = role, policy
        code = "200" if free else "RoleAttachmentUnExpected"
        results.append({"InstanceId": each.instance_id, "Success": free, "Code": code, "Message": ""})
    failed = sum(not each["Success"] for each in results)
    told = {"RamRoleName": role, "TotalCount": len(results), "FailCount": failed}
    return {**told, "AttachInstanceRamRoleResults": {"AttachInstanceRamRoleResult": results}}


def _is_policy(text: str) -> bool:
    try:
        return all(each["Effect"] and each["Action"] for each in json.loads(text)["Statement"])
    except (ValueError, KeyError, TypeError):
        return False


@action("DescribeInstanceRamRole")
def describe_roles(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The role of each machine asked for, empty where it has none."""
    rows = [{"InstanceId": each.instance_id, "RamRoleName": each.ram_role} for each in _asked(cloud, p)]
    told = {"RegionId": cloud.account.region_id, "TotalCount": len(rows)}
    return {**told, "InstanceRamRoleSets": {"InstanceRamRoleSet": rows}}
