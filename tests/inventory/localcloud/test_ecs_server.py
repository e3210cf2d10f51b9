"""The ECS API's server: refusals, idempotence, faults, restart."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from inventory.localcloud import control
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import dispatch
from inventory.localcloud.ecs.account import EmulatedDisk
from inventory.localcloud.ecs.actions import ACTIONS, EmulatedCloud
from inventory.localcloud.ecs.api import Api
from inventory.localcloud.ecs.dispatch import Dispatcher, Fault, FaultFile, struck
from inventory.localcloud.places import Places, control_socket
from tests.support.ecs_api import EcsApi
from tests.support.fake_machines import FakeMachines
from tests.support.signed_calls import http, signed_headers, v3


@pytest.fixture(scope="module")
def api():
    with EcsApi() as api:
        yield api


@pytest.fixture(autouse=True)
def no_faults_left(api):
    yield
    api.faults.clear()


def test_it_listens_on_loopback_alone(api):
    assert api.endpoint.startswith("127.0.0.1:")
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(1)
        other.connect(("127.0.0.2", api.port))


def test_an_unknown_region_is_refused_with_those_there_are(api):
    status, error = v3(api, "DescribeInstanceTypes", RegionId="cn-hangzou")
    assert (status, error["Code"]) == (404, "InvalidRegionId.NotFound")
    assert all(region in error["Message"] for region in ("cn-hangzhou, ", "eu-central-1"))


def test_an_answer_has_its_request_id_and_the_vendors_headers(api):
    headers = signed_headers(
        host=api.endpoint,
        action="DescribeInstanceTypes",
        version="2014-05-26",
        query={},
        key=(api.access_key_id, api.access_key_secret),
        now=time.time(),
        nonce=uuid.uuid4().hex,
    )
    status, told, text = http(api, "POST", {}, headers)
    assert status == 200
    assert told["x-acs-request-id"] == json.loads(text)["RequestId"]
    assert told["Content-Type"].startswith("application/json")


def test_an_error_body_is_as_documented(api):
    status, error = v3(api, "DescribeNothing")
    assert (status, error["Code"]) == (404, "InvalidAction.NotFound")
    assert set(error) == {"RequestId", "HostId", "Code", "Message", "Recommend"}
    assert error["HostId"] == api.endpoint


@pytest.mark.parametrize(
    ("action", "name", "value"),
    [
        ("DescribeInstances", "NextToken", "!!"),
        ("DescribeInstances", "MaxResults", "abc"),
        ("DescribeInstances", "InstanceIds", "i-1"),
        ("DescribeDisks", "DiskIds", "7"),
        ("DescribeSpotPriceHistory", "StartTime", "noon"),
        ("RunCommand", "CommandContent", "a"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_refused_by_its_name(api, action, name, value):
    others = {"InstanceType": "ecs.local.small", "NetworkType": "vpc", "InstanceId.1": "i-1", "Type": "RunShellScript"}
    needed = {key: others[key] for key in WITH.get(action, ())}
    status, error = v3(api, action, **{"RegionId": "cn-hangzhou", **needed, name: value})
    assert (status, error["Code"]) == (400, f"InvalidParameter.{name}")


WITH = {"DescribeSpotPriceHistory": ("InstanceType", "NetworkType"), "RunCommand": ("InstanceId.1", "Type")}
"""What must be there beside it."""


def test_another_version_is_refused(api):
    status, error = v3(api, "DescribeInstanceTypes", version="2013-01-01")
    assert (status, error["Code"]) == (400, "InvalidVersion")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"secret": "wrong"}, (400, "SignatureDoesNotMatch")),
        ({"at": 1_600_000_000}, (400, "InvalidTimeStamp.Expired")),
    ],
)
def test_a_wrong_signature_and_an_old_date_are_refused(api, change, refusal):
    status, error = v3(api, "DescribeInstanceTypes", **change)
    assert (status, error["Code"]) == refusal


def test_a_nonce_is_good_for_one_call(api):
    assert v3(api, "DescribeInstanceTypes", nonce="twice")[0] == 200
    status, error = v3(api, "DescribeInstanceTypes", nonce="twice")
    assert (status, error["Code"]) == (400, "SignatureNonceUsed")


def test_a_wrongly_signed_call_uses_up_no_nonce(api):
    assert v3(api, "DescribeInstanceTypes", nonce="once", secret="wrong")[0] == 400
    assert v3(api, "DescribeInstanceTypes", nonce="once")[0] == 200


def test_an_unsigned_request_gets_nothing(api):
    status, _, text = http(api, "GET", {"Action": "DescribeInstanceTypes", "Version": "2014-05-26"})
    assert (status, json.loads(text)["Code"]) == (400, "IncompleteSignature")
    assert "ACS3-HMAC-SHA256" in json.loads(text)["Message"], "what an older client must sign with"


def test_a_long_script_fits_into_the_url(api):
    status, error = v3(api, "DescribeNothing", CommandContent="A" * 46_000)
    assert (status, error["Code"]) == (404, "InvalidAction.NotFound")


def vpc_of(api):
    status, answer = v3(api, "CreateVpc", version="2016-04-28", CidrBlock="192.168.0.0/16")
    assert status == 200
    api.hurry(1)
    listed = v3(api, "DescribeVpcs", version=dispatch.VPC, VpcId=answer["VpcId"])[1]
    assert listed["Vpcs"]["Vpc"][0]["Status"] == "Available"
    return answer["VpcId"]


def test_a_client_token_does_its_deed_once(api):
    asked = {"VpcId": vpc_of(api), "SecurityGroupName": "once", "ClientToken": "t1"}
    first, again = v3(api, "CreateSecurityGroup", asked)[1], v3(api, "CreateSecurityGroup", asked)[1]
    assert first["SecurityGroupId"] == again["SecurityGroupId"]
    assert first["RequestId"] != again["RequestId"]
    status, error = v3(api, "CreateSecurityGroup", asked | {"SecurityGroupName": "other"})
    assert (status, error["Code"]) == (400, "IdempotentParameterMismatch")


def test_the_token_of_a_refused_call_can_be_used_again(api):
    vpc = vpc_of(api)
    wrong = v3(api, "CreateSecurityGroup", VpcId="vpc-none", ClientToken="t2")
    assert (wrong[0], wrong[1]["Code"]) == (404, "InvalidVpcId.NotFound")
    assert v3(api, "CreateSecurityGroup", VpcId=vpc, ClientToken="t2")[0] == 200


def test_a_dry_run_ends_as_an_error_and_leaves_nothing(api):
    before, asked = len(api.cloud.account.vpcs), {"version": "2016-04-28", "ClientToken": "t3"}
    status, error = v3(api, "CreateVpc", DryRun=True, **asked)
    assert (status, error["Code"]) == (400, "DryRunOperation")
    assert len(api.cloud.account.vpcs) == before
    assert v3(api, "CreateVpc", **asked)[0] == 200


def test_a_call_that_still_runs_is_not_begun_again(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    deeds = []

    def slow(cloud, p):
        deeds.append(p)
        begun.set()
        assert go_on.wait(60)
        return {"Done": True}

    monkeypatch.setitem(ACTIONS, (dispatch.ECS, "Slow"), slow)
    dispatcher = Dispatcher(
        EmulatedCloud(tmp_path / "world.json", FakeMachines(tmp_path)), FaultFile(tmp_path / "faults.json")
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(dispatcher.answer, dispatch.ECS, "Slow", {"ClientToken": "t"})
        assert begun.wait(60)
        second = pool.submit(dispatcher.answer, dispatch.ECS, "Slow", {"ClientToken": "t"})
        go_on.set()
        assert first.result(10) == second.result(10) == {"Done": True}
    assert len(deeds) == 1


def test_an_answer_lost_after_the_deed_is_given_to_the_next_try(api):
    vpc = vpc_of(api)
    api.fault("CreateSecurityGroup", "lost-answer")
    before = set(api.cloud.account.security_groups)
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        v3(api, "CreateSecurityGroup", VpcId=vpc, ClientToken="t4")
    (made,) = set(api.cloud.account.security_groups) - before
    assert v3(api, "CreateSecurityGroup", VpcId=vpc, ClientToken="t4")[1]["SecurityGroupId"] == made


def test_a_timed_out_call_did_nothing(api):
    vpc, before = vpc_of(api), set(api.cloud.account.security_groups)
    api.fault("CreateSecurityGroup", "time-out", hold_s=0.3)
    started = time.monotonic()
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        v3(api, "CreateSecurityGroup", VpcId=vpc)
    assert time.monotonic() - started >= 0.3
    assert set(api.cloud.account.security_groups) == before


def test_faults_strike_when_and_where_they_were_told_to():
    plan = (
        Fault("RunInstances", "no-stock", times=2, skip=1, zone="z-h"),
        Fault("*", "throttle", times=0, instance_type="big"),
    )
    hits = []
    for zone, instance_type in [("z-h", ""), ("z-i", ""), ("z-h", ""), ("z-h", "big"), ("z-h", ""), ("z-h", "big")]:
        hit, plan = struck(plan, "RunInstances", zone, instance_type)
        hits.append(hit.kind if hit else "")
    assert hits == ["", "", "no-stock", "no-stock", "", "throttle"]
    assert [fault.kind for fault in plan] == ["throttle"]


def test_an_unknown_fault_is_refused(api):
    with pytest.raises(LocalCloudError, match="there is no fault 'earthquake'; there is: throttle"):
        api.fault("RunInstances", "earthquake")
    with pytest.raises(LocalCloudError, match="price-moved needs the instance type"):
        api.fault("RunInstances", "price-moved")


def test_disks_of_a_struck_call_are_being_initialised(tmp_path, monkeypatch):
    cloud = EmulatedCloud(tmp_path / "world.json", FakeMachines(tmp_path))
    faults = FaultFile(tmp_path / "faults.json")

    def make(cloud, p):
        cloud.account.disks["d-1"] = EmulatedDisk(
            disk_id="d-1", kind="data", size_gib=1, category="cloud_essd", zone_id="z", created=cloud.now()
        )
        return {}

    monkeypatch.setitem(ACTIONS, (dispatch.ECS, "MakeDisk"), make)
    faults.add(Fault("MakeDisk", "disk-initialising", hold_s=60))
    Dispatcher(cloud, faults).answer(dispatch.ECS, "MakeDisk", {})
    assert cloud.now() + 50 < cloud.account.disks["d-1"].ready_at <= cloud.now() + 60


def test_everything_is_still_there_after_a_restart():
    with EcsApi() as api:
        vpc = vpc_of(api)
        group = v3(api, "CreateSecurityGroup", VpcId=vpc, ClientToken="t", nonce="n")[1]["SecurityGroupId"]
        endpoint = api.endpoint
        api.restart()
        assert api.endpoint == endpoint
        listed = v3(api, "DescribeSecurityGroups", VpcId=vpc)[1]["SecurityGroups"]["SecurityGroup"]
        assert [each["SecurityGroupId"] for each in listed] == [group]
        assert v3(api, "CreateSecurityGroup", VpcId=vpc, ClientToken="t")[1]["SecurityGroupId"] == group
        assert v3(api, "CreateSecurityGroup", VpcId=vpc, nonce="n")[1]["Code"] == "SignatureNonceUsed"


def test_the_clock_is_put_forward_and_calls_are_still_signed_by_the_real_one(api):
    before = v3(api, "Now", version="local")[1]["Now"]
    assert v3(api, "Hurry", version="local", Seconds=86_400)[1]["Now"] >= before + 86_400
    assert v3(api, "DescribeInstanceTypes")[0] == 200


@pytest.fixture
def driven(api, tmp_path, monkeypatch):
    """The places of a cloud whose control socket is answered by the API."""
    places = Places("demo", tmp_path / ("deep" * 20) / ("deeper" * 10))
    places.folder.mkdir(parents=True)
    monkeypatch.setattr(control.served, "endpoint", lambda of: api.endpoint)

    async def serve():
        with control_socket(places.folder) as path:
            server = await asyncio.start_unix_server(Api(api.cloud, api.faults, {}).control, path)
        ready.set()
        async with server:
            await server.serve_forever()

    ready, loop = threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield places
    loop.call_soon_threadsafe(task.cancel)
    thread.join(60)
    loop.close()


def test_who_may_enter_the_folder_drives_the_cloud_without_a_key(api, driven):
    before = api.cloud.now()
    assert control.hurry(driven, 100) == api.cloud.account.clock_offset_s
    assert api.cloud.now() >= before + 100
    with pytest.raises(LocalCloudError, match=r"Reclaim: InvalidInstanceId\.NotFound: The specified"):
        control.call(driven, "Reclaim", InstanceId="i-none")
    with pytest.raises(LocalCloudError, match=r"DescribeNothing: InvalidAction\.NotFound"):
        control.call(driven, "DescribeNothing", "2014-05-26")


def test_a_cloud_that_does_not_run_is_not_driven(driven, monkeypatch):
    monkeypatch.setattr(control.served, "endpoint", lambda of: "")
    with pytest.raises(LocalCloudError, match=r"'demo' does not run; start it: fab local\.serve"):
        control.hurry(driven, 1)


def test_an_action_that_breaks_is_an_internal_error(api, monkeypatch):
    monkeypatch.setitem(ACTIONS, (dispatch.ECS, "Break"), lambda cloud, p: 1 / 0)
    status, error = v3(api, "Break")
    assert (status, error["Code"]) == (500, "InternalError")
    assert "ZeroDivision" not in error["Message"]


def test_a_cluster_of_the_local_endpoint_finds_the_api(api, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    api.write_local_state("rented")
    folder = tmp_path / "spotune" / "localcloud" / "rented"
    assert json.loads((folder / "api.json").read_text())["endpoint"] == api.endpoint
    assert (folder / "credentials.ini").stat().st_mode & 0o777 == 0o600
    assert api.access_key_secret in (folder / "credentials.ini").read_text()
