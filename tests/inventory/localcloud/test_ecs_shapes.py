"""Answers of the local cloud's ECS API have the shapes of the real one's: of recordings and of the SDK's models.

Every action whose name begins with Describe or List is walked, and every other one that was called on the way there.
For each key of an answer: it is in the SDK's model (or in a documented answer that is older than the model),
its JSON type is the model's, and its time format is the recordings'. And what our code reads of an answer is there.
"""

import importlib
import inspect
import json
import os
import re
import time
import uuid
from pathlib import Path

import pytest

from inventory.localcloud.ecs.actions import ACTIONS, ECS, VPC
from tests.support.ecs_api import EcsApi
from tests.support.signed_calls import PUBLIC_KEY, v3
from tests.support.skips import RECORDINGS

SAMPLES = Path(os.environ.get("SPOTUNE_ECS_SAMPLES", Path(__file__).parents[4] / "shared" / "samples" / "aliyun"))
MODELS = pytest.importorskip("alibabacloud_ecs20140526", reason="the vendor's SDK is not installed")
PRICED = ("ImageId", "InstanceType", "SpotStrategy", "InternetMax", "SystemDisk", "DataDisk")
RECORDED = {
    "jclouds_availableZones.json": "DescribeAvailableResource",
    "jclouds_images-first.json": "DescribeImages",
    "jclouds_instanceTypes.json": "DescribeInstanceTypes",
    "jclouds_instances-first.json": "DescribeInstances",
    "jclouds_keypairs-first.json": "DescribeKeyPairs",
    "jclouds_securitygroups-first.json": "DescribeSecurityGroups",
    "jclouds_vpc-create-res.json": "CreateVpc",
    "jclouds_vpcs-first.json": "DescribeVpcs",
    "jclouds_vswitch-create-res.json": "CreateVSwitch",
    "jclouds_vswitches-first.json": "DescribeVSwitches",
}
TIMES = {
    "seconds": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    "minutes": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ"),
}
JSON_TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool}


@pytest.fixture(scope="module")
def answers():
    """action -> its answers over machines on paper: an account with something of everything in it."""
    with EcsApi() as api:
        yield everything(api)


def everything(api):
    told = {}

    def call(action, version=ECS, **flat):
        asked = {"RegionId": "cn-hangzhou"} | {name.replace("__", "."): value for name, value in flat.items()}
        status, answer = v3(api, action, asked, version=version, nonce=uuid.uuid4().hex)
        assert status == 200, (action, answer)
        told.setdefault(action, []).append(answer)
        return answer

    vpc = call("CreateVpc", VPC, CidrBlock="10.0.0.0/8", VpcName="net")["VpcId"]
    api.hurry(1)
    zone = {"ZoneId": "cn-hangzhou-h"}
    vswitch = call("CreateVSwitch", VPC, VpcId=vpc, CidrBlock="10.0.0.0/24", **zone)["VSwitchId"]
    tag = {"Tag__1__Key": "k", "Tag__1__Value": "v"}
    group = call("CreateSecurityGroup", VpcId=vpc, SecurityGroupName="group", **tag)["SecurityGroupId"]
    rule = {"IpProtocol": "tcp", "PortRange": "22/22", "SourceCidrIp": "203.0.113.7/32"}
    call("AuthorizeSecurityGroup", SecurityGroupId=group, **{f"Permissions__1__{k}": v for k, v in rule.items()})
    call("ImportKeyPair", KeyPairName="pair", PublicKeyBody=PUBLIC_KEY, **tag)
    order = {
        "ImageId": call("DescribeImages")["Images"]["Image"][0]["ImageId"],
        "InstanceType": "ecs.local.small",
        "SecurityGroupId": group,
        "VSwitchId": vswitch,
        "KeyPairName": "pair",
        "InstanceName": "one",
        "SpotStrategy": "SpotAsPriceGo",
        "AutoReleaseTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 7200)),
        "InternetMaxBandwidthOut": 5,
        "SystemDisk__Category": "cloud_essd",
        "SystemDisk__Size": 20,
        "DataDisk__1__Category": "cloud_essd",
        "DataDisk__1__Size": 20,
        "DataDisk__1__PerformanceLevel": "PL1",
    }
    (machine,) = call("RunInstances", **order, **tag)["InstanceIdSets"]["InstanceIdSet"]
    api.settle()
    (data,) = [disk.disk_id for disk in api.cloud.account.disks.values() if disk.kind == "data"]
    snapshot = call("CreateSnapshot", DiskId=data, SnapshotName="snap", **tag)["SnapshotId"]
    api.settle()
    call("DescribeSnapshots")
    spare = {"DiskCategory": "cloud_essd", "Size": 20, **zone}
    call("CreateDisk", DiskName="spare", **spare, **tag)["DiskId"]
    v3(api, "Reclaim", version="local", InstanceId=machine, NoticeSeconds=600)
    v3(api, "Hurry", version="local", Seconds=60)
    api.settle()
    script = {"Type": "RunShellScript", "CommandContent": "dHJ1ZQ==", "ContentEncoding": "Base64"}
    ran = call("RunCommand", InstanceId__1=machine, **script)
    api.settle()
    asked = {
        "DescribeAvailableResource": [{"DestinationResource": kind} for kind in ("InstanceType", "DataDisk")],
        "DescribeInvocationResults": [{"InvokeId": ran["InvokeId"]}],
        "DescribeKeyPairs": [{"IncludePublicKey": True}],
        "DescribePrice": [{"ResourceType": "instance", **{k: v for k, v in order.items() if k.startswith(PRICED)}}],
        "DescribeSecurityGroupAttribute": [{"SecurityGroupId": group}],
        "DescribeSpotAdvice": [{"InstanceTypes__1": "ecs.local.small"}],
        "DescribeSpotPriceHistory": [{"NetworkType": "vpc", "InstanceType": "ecs.local.small"}],
    }
    for version, action in sorted(ACTIONS):
        if version != "local" and action.startswith(("Describe", "List")):
            for flat in asked.get(action, [{}]):
                call(action, version, **flat)
    call("DeleteSnapshot", SnapshotId=snapshot)
    return told


def actions():
    return sorted({action for version, action in ACTIONS if version != "local"})


def reading_actions():
    return [action for action in actions() if action.startswith(("Describe", "List"))]


def model_of(action):
    module = importlib.import_module("alibabacloud_ecs20140526.models")
    return getattr(module, f"{action}ResponseBody", None)


def fields_of(model):
    """Name on the wire -> the type the SDK's model declares, as it is written there."""
    source = inspect.getsource(model.to_map)
    wire = dict(re.findall(r"if self\.(\w+) is not None:\s+result\['(\w+)'\]", source))
    wire |= {attribute: name for name, attribute in re.findall(r"result\['(\w+)'\] = \[\]\s+if self\.(\w+) is", source)}
    declared = inspect.signature(model.__init__).parameters
    return {name: str(declared[attribute].annotation) for attribute, name in wire.items()}


def against_model(value, declared, path, module):
    """What of a value is not as the model declares it: one line each."""
    if match := re.fullmatch(r"List\[(.+)\]", declared):
        if not isinstance(value, list):
            return [f"{path} is {value!r}, not a list"]
        return [line for each in value for line in against_model(each, match[1], path, module)]
    if declared.startswith("main_models."):
        if not isinstance(value, dict):
            return [f"{path} is {value!r}, not an object"]
        return object_against_model(value, getattr(module, declared.removeprefix("main_models.")), path, module)
    expected = JSON_TYPES[declared]
    if not isinstance(value, expected) or (isinstance(value, bool) and declared != "bool"):
        return [f"{path} is {value!r}, not {declared}"]
    return []


def object_against_model(value, model, path, module):
    lines, fields = [], fields_of(model)
    for name, inner in value.items():
        if name in fields:
            lines += against_model(inner, fields[name], f"{path}.{name}", module)
        else:
            lines.append(f"{path}.{name} is not in the model")
    return lines


def test_every_key_of_an_answer_is_in_the_sdks_model_with_its_type(answers):
    module, lines = importlib.import_module("alibabacloud_ecs20140526.models"), set()
    for action, each in ((action, each) for action, told in answers.items() for each in told):
        assert model_of(action), f"the SDK knows no {action}"
        lines.update(object_against_model(each, model_of(action), action, module))
    assert sorted(lines) == []


def test_the_typed_client_loses_nothing_of_an_answer(answers):
    for action in reading_actions():
        for each in answers[action]:
            assert model_of(action)().from_map(each).to_map() == each, action


def samples():
    """(file, action) of every recording and documented example of an action there is here."""
    found = [(path, path.stem.removeprefix("doc_")) for path in sorted(SAMPLES.glob("doc_*.json"))]
    found += [(path, path.stem.split("_")[1]) for path in sorted(SAMPLES.glob("ts_*.json"))]
    found += [(SAMPLES / name, action) for name, action in RECORDED.items() if (SAMPLES / name).exists()]
    known = set(actions())
    return [(path, action) for path, action in found if action in known]


def leaves(value, path=()):
    """(path of keys, value) of everything in a JSON value that is no object and no list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def format_of(value):
    if not isinstance(value, str):
        return None
    return next((name for name, form in TIMES.items() if form.fullmatch(value)), None)


@pytest.fixture(scope="module")
def recorded():
    """action -> path of keys -> the values that real answers have there."""
    if not SAMPLES.exists():
        pytest.skip(RECORDINGS)
    found = {}
    for path, action in samples():
        for keys, value in leaves(json.loads(path.read_text(encoding="utf-8"))):
            found.setdefault(action, {}).setdefault(keys, []).append((path.name, value))
    return found


def test_types_and_times_of_an_answer_are_those_of_the_recordings(answers, recorded):
    wrong = []
    for action in sorted(set(answers) & set(recorded)):
        for keys, ours in (leaf for each in answers[action] for leaf in leaves(each)):
            real = recorded[action].get(keys, [])
            if real and not any(is_like(ours, value) for _, value in real) and not is_the_models(action, keys, ours):
                wrong.append(f"{action} {'.'.join(keys)} is {ours!r}; recorded: {real[0][1]!r} ({real[0][0]})")
    assert sorted(set(wrong)) == []


def is_like(ours, real):
    """The same JSON type and, where the recorded one is a time, the same way to write one."""
    if isinstance(ours, bool) or isinstance(real, bool):
        return isinstance(ours, bool) and isinstance(real, bool)
    if isinstance(ours, (int, float)) or isinstance(real, (int, float)):
        return isinstance(ours, (int, float)) and isinstance(real, (int, float))
    return "" in (ours, real) or format_of(ours) == format_of(real)


def is_the_models(action, keys, ours):
    """Some documented examples write a number as text or the other way round; there the SDK's model decides."""
    module = importlib.import_module("alibabacloud_ecs20140526.models")
    model, declared = model_of(action), ""
    for key in keys:
        declared = fields_of(model).get(key, "")
        inner = re.sub(r"^List\[(.+)\]$", r"\1", declared).removeprefix("main_models.")
        model = getattr(module, inner, None)
    kind = JSON_TYPES.get(declared)
    return bool(kind) and isinstance(ours, kind) and format_of(ours) is None


def test_the_walk_covers_the_recordings(recorded):
    """Guards the walk itself: what the recordings have much of is in it."""
    assert len(recorded) >= 20
    assert ("Instances", "Instance", "CreationTime") in recorded["DescribeInstances"]


def test_what_our_code_reads_of_answers_is_there(answers):
    """Our parsers find every field they look for in the emulator's answers."""
    readers = {
        "DescribeInstances": ("machines", "instances_in"),
        "DescribeDisks": ("disks", "disks_in"),
        "DescribeSnapshots": ("disks", "snapshots_in"),
        "DescribeInstanceTypes": ("offers", "types_in"),
        "DescribeSpotPriceHistory": ("offers", "spot_prices_in"),
        "DescribeSpotAdvice": ("offers", "spot_advice_in"),
        "DescribePrice": ("offers", "price_in"),
        "DescribeImages": ("disks", "images_in"),
        "DescribeKeyPairs": ("machines", "key_pairs_in"),
        "DescribeSecurityGroups": ("network", "security_groups_in"),
        "DescribeSecurityGroupAttribute": ("network", "rules_in"),
        "DescribeVpcs": ("network", "vpcs_in"),
        "DescribeVSwitches": ("network", "subnets_in"),
    }
    for action, (module, name) in readers.items():
        read = getattr(importlib.import_module(f"inventory.aliyun_ecs.{module}"), name)
        missing = []
        for each in answers[action]:
            vain = []
            assert read(watched(each, vain)), action
            missing.append(set(vain))
        assert sorted(set.intersection(*missing)) == [], action


class Watched(dict):
    """A dict that notes the keys that were looked for in vain."""

    def __init__(self, content, missing):
        super().__init__({name: watched(value, missing) for name, value in content.items()})
        self.missing = missing

    def get(self, key, default=None):
        if key not in self:
            self.missing.append(key)
        return super().get(key, default)


def watched(value, missing):
    if isinstance(value, dict):
        return Watched(value, missing)
    return [watched(each, missing) for each in value] if isinstance(value, list) else value


def test_the_table_of_actions_in_the_document_is_complete():
    """docs/local-cloud-api.md names every action there is, and none that there is not."""
    text = (Path(__file__).parents[3] / "docs" / "local-cloud-api.md").read_text(encoding="utf-8")
    rows = text.partition("## Actions")[2].partition("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("|")][2:]
    named = {re.sub(r"[^A-Za-z]", "", each) for cell in cells for each in re.sub(r"\(s\)", "", cell).split(",")}
    plural = {each for each in actions() if each in {f"{name}s" for name in named} and each[:-1] in actions()}
    assert named | plural == set(actions())


def test_the_walk_notices_what_is_wrong():
    """A key too many, a wrong type and a wrong time are all told."""
    module = importlib.import_module("alibabacloud_ecs20140526.models")
    model = model_of("DescribeKeyPairs")
    pairs = {"KeyPairs": {"KeyPair": [{"KeyPairName": 1, "Colour": "red"}]}}
    assert object_against_model(pairs, model, "A", module) == [
        "A.KeyPairs.KeyPair.KeyPairName is 1, not str",
        "A.KeyPairs.KeyPair.Colour is not in the model",
    ]
    assert not is_like("2024-01-01T00:00:00Z", "2024-01-01T00:00Z")
    assert not is_like("1", 1)
