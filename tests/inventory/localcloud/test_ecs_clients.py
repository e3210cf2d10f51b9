"""The vendor's client against the local cloud's ECS API."""

import json

import pytest

from tests.support.ecs_api import EcsApi
from tests.support.signed_calls import PUBLIC_KEY, v3

REGION = "cn-hangzhou"
GIB = 1 << 30


@pytest.fixture(scope="module")
def api():
    with EcsApi() as api:
        yield api


@pytest.fixture(autouse=True)
def undisturbed(api, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    api.faults.clear()


@pytest.fixture(scope="module")
def place(api):
    """A vSwitch and a security group to put machines into."""
    vpc = v3(api, "CreateVpc", version="2016-04-28", CidrBlock="10.2.0.0/16")[1]["VpcId"]
    api.hurry(1)
    zone = {"VpcId": vpc, "ZoneId": "cn-hangzhou-h"}
    vswitch = v3(api, "CreateVSwitch", zone, version="2016-04-28", CidrBlock="10.2.1.0/24")[1]["VSwitchId"]
    return vswitch, v3(api, "CreateSecurityGroup", VpcId=vpc)[1]["SecurityGroupId"]


def typed_client(api):
    pytest.importorskip("alibabacloud_ecs20140526")
    from alibabacloud_ecs20140526.client import Client
    from alibabacloud_tea_openapi.utils_models import Config

    key = {"access_key_id": api.access_key_id, "access_key_secret": api.access_key_secret}
    return Client(Config(**key, endpoint=api.endpoint, protocol="http", region_id="cn-hangzhou"))


def test_the_typed_client_creates_describes_and_deletes(api):
    client = typed_client(api)
    from alibabacloud_ecs20140526 import models

    made = client.import_key_pair(
        models.ImportKeyPairRequest(region_id="cn-hangzhou", key_pair_name="typed", public_key_body=PUBLIC_KEY)
    )
    listed = client.describe_key_pairs(models.DescribeKeyPairsRequest(region_id="cn-hangzhou", key_pair_name="typed"))
    (pair,) = listed.body.key_pairs.key_pair
    assert pair.key_pair_finger_print == made.body.key_pair_finger_print
    client.delete_key_pairs(models.DeleteKeyPairsRequest(region_id="cn-hangzhou", key_pair_names='["typed"]'))
    listed = client.describe_key_pairs(models.DescribeKeyPairsRequest(region_id="cn-hangzhou", key_pair_name="typed"))
    assert listed.body.key_pairs.key_pair == []


def test_the_typed_client_calls_the_product_vpc_too(api):
    client = typed_client(api)
    from alibabacloud_tea_openapi.utils_models import OpenApiRequest, Params
    from darabonba.runtime import RuntimeOptions

    params = Params(
        action="CreateVpc",
        version="2016-04-28",
        protocol="HTTP",
        pathname="/",
        method="POST",
        auth_type="AK",
        style="RPC",
        req_body_type="formData",
        body_type="json",
    )
    body = {"RegionId": "cn-hangzhou", "VpcName": "by form", "CidrBlock": "10.1.0.0/16"}
    answer = client.call_api(params, OpenApiRequest(body=body), RuntimeOptions())
    assert api.cloud.account.vpcs[answer["body"]["VpcId"]].name == "by form"


def test_the_typed_client_tells_errors_and_throttling_apart(api):
    client = typed_client(api)
    from alibabacloud_ecs20140526 import models
    from alibabacloud_tea_openapi.exceptions import ClientException, ServerException, ThrottlingException

    request = models.DescribeKeyPairsRequest(region_id="cn-hangzhou")
    api.fault("DescribeKeyPairs", "throttle")
    with pytest.raises(ThrottlingException) as throttled:
        client.describe_key_pairs(request)
    assert (throttled.value.code, throttled.value.retry_after) == ("Throttling.User", 200)
    api.fault("DescribeKeyPairs", "error-500")
    with pytest.raises(ServerException):
        client.describe_key_pairs(request)
    with pytest.raises(ClientException) as unknown:
        client.describe_key_pairs(models.DescribeKeyPairsRequest(region_id="cn-nowhere"))
    assert unknown.value.code == "InvalidRegionId.NotFound"
    assert client.describe_key_pairs(request).body.total_count == 0


def written_disk(api, instance_id):
    """The data disk of a machine, once it runs, with something on it."""
    api.settle()
    (disk,) = [d for d in api.cloud.account.disks.values() if d.instance_id == instance_id and d.kind == "data"]
    with api.paper.disk(disk.disk_id).open("r+b") as file:
        file.seek(GIB)
        file.write(b"the run so far")
    return disk.disk_id


def content(api, snapshot_id):
    api.settle()
    with api.paper.snapshot(snapshot_id).open("rb") as file:
        file.seek(GIB)
        return file.read(14)


def test_the_typed_client_rents_snapshots_and_gives_back(api, place):
    client = typed_client(api)
    from alibabacloud_ecs20140526 import models

    vswitch, group = place
    launch = models.RunInstancesRequest(
        region_id=REGION,
        image_id="debian_12_x64_20G_local",
        instance_type="ecs.local.small",
        v_switch_id=vswitch,
        security_group_id=group,
        spot_strategy="SpotAsPriceGo",
        system_disk=models.RunInstancesRequestSystemDisk(category="cloud_essd", size="20"),
        data_disk=[models.RunInstancesRequestDataDisk(category="cloud_essd", size=20)],
        tag=[models.RunInstancesRequestTag(key="k", value="typed")],
        dry_run=True,
    )
    with pytest.raises(Exception, match="DryRun flag set") as dry:
        client.run_instances(launch)
    assert dry.value.code == "DryRunOperation"
    launch.dry_run = False
    (machine,) = client.run_instances(launch).body.instance_id_sets.instance_id_set
    disk = written_disk(api, machine)
    listing = models.DescribeInstancesRequest(
        region_id=REGION, tag=[models.DescribeInstancesRequestTag(key="k", value="typed")]
    )
    (shown,) = client.describe_instances(listing).body.instances.instance
    assert (shown.instance_id, shown.status, shown.spot_strategy) == (machine, "Running", "SpotAsPriceGo")
    snapshot = client.create_snapshot(models.CreateSnapshotRequest(disk_id=disk, snapshot_name="one")).body.snapshot_id
    looked = client.describe_snapshots(
        models.DescribeSnapshotsRequest(region_id=REGION, snapshot_ids=json.dumps([snapshot]))
    )
    assert [each.status for each in looked.body.snapshots.snapshot] == ["progressing"]
    assert content(api, snapshot) == b"the run so far"
    client.delete_snapshot(models.DeleteSnapshotRequest(snapshot_id=snapshot, force=True))
    client.delete_instances(models.DeleteInstancesRequest(region_id=REGION, instance_id=[machine], force=True))
    api.settle()
    assert client.describe_instances(listing).body.instances.instance == []
    assert not api.cloud.account.disks
    assert not list((api.folder / "paper").rglob("*.img"))


def test_a_wrong_secret_is_refused(api):
    client, secret = typed_client(api), api.access_key_secret
    from alibabacloud_ecs20140526 import models
    from alibabacloud_tea_openapi.exceptions import ClientException

    api.access_key_secret = "wrong"
    try:
        with pytest.raises(ClientException) as typed:
            typed_client(api).describe_key_pairs(models.DescribeKeyPairsRequest(region_id=REGION))
    finally:
        api.access_key_secret = secret
    assert typed.value.code == "SignatureDoesNotMatch"
    assert client.describe_key_pairs(models.DescribeKeyPairsRequest(region_id=REGION)).body.total_count == 0
