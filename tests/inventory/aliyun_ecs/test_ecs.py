"""The face of the cloud's API, by the vendor's SDK, against a real HTTP server that answers from a script."""

import base64
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inventory.aliyun_ecs.caller import ECS, STS, VPC
from inventory.aliyun_ecs.client import Ecs
from inventory.aliyun_ecs.machines import ordered_name
from inventory.aliyun_ecs.network import Rule
from inventory.aliyun_settings import Aliyun
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.pace import CallPace
from inventory.cloud.values import CLUSTER_TAG, MachineRequest, NewDisk
from inventory.localcloud.places import Places
from inventory.renting.intents import Intents
from inventory.settings import Settings
from tests.support.scripted_api import Say, ScriptedApi, refusal
from training.text import internet

pytest.importorskip("alibabacloud_ecs20140526", reason="needs the [dev] extra: the vendor's SDK and its models")
from inventory.aliyun_ecs.sdk import host_of

ROOT = Path(__file__).parents[3]
SECRET = "dGhlIHNlY3JldCBvZiB0aGlzIHRlc3Q"
QUICK = CallPace(first_s=0.01, longest_s=0.05, throttled_s=2, poll_s=0.01, wait_limit_s=0.5, read_s=20)
ORDER = MachineRequest(
    zone_id="cn-hangzhou-h",
    instance_type="ecs.a.small",
    image_id="m-1",
    security_group_id="sg-1",
    subnet_id="vsw-1",
    min_amount=2,
    names=("c-te1", "c-te2"),
    key_pair="c-key",
    system_disk=NewDisk("cloud_essd", 60, "PL1"),
    data_disks=(NewDisk("cloud_essd", 120, "PL1", "s-1", False, "c-te1-data"),),
    release_at=datetime(2026, 1, 2, 3, 4, 59, tzinfo=UTC),
    public_mbps=50,
    tags={CLUSTER_TAG: "c", "a": "1"},
)
RAN = Say(body={"RequestId": "R", "InstanceIdSets": {"InstanceIdSet": ["i-1", "i-2"]}})


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Opens the cloud of a scripted server as the local cloud's would be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SPOTUNE_ECS_RECORD", raising=False)

    def opened(api, record=None, pace=QUICK, pid=None):
        settings = write_state(api.endpoint, pid or os.getpid())
        return Ecs.open(settings, record=record, pace=pace)

    return opened


def write_state(endpoint, pid):
    settings = Settings(name="scripted", provider="aliyun", aliyun=Aliyun(endpoint="local"))
    folder = Places.of(settings.name).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "api.json").write_text(json.dumps({"endpoint": endpoint, "pid": pid}))
    keys = f"[default]\ntype = access_key\naccess_key_id = LTAItest\naccess_key_secret = {SECRET}\n"
    (folder / "credentials.ini").write_text(keys)
    return settings


def listed(*items, token="", of="Instance"):
    return Say(body={"RequestId": "R", f"{of}s": {of: list(items)}, "NextToken": token})


def machine(name="i-1"):
    told = {"InstanceId": name, "Status": "Running", "InstanceType": "ecs.a", "ZoneId": "r-h"}
    return told | {"CreationTime": "2024-02-21T03:58Z"}


def disk(status, instance=""):
    told = {"DiskId": "d-1", "Type": "data", "Size": 10, "Category": "cloud_essd", "ZoneId": "r-h"}
    return told | {"Status": status, "InstanceId": instance, "CreationTime": "2024-02-21T03:58:01Z"}


def test_an_order_carries_every_field_and_its_token(at):
    with ScriptedApi(RAN) as api:
        assert at(api).run(ORDER, "token-1") == ("i-1", "i-2")
    ((action, sent),) = api.calls
    assert action == "RunInstances"
    assert (sent["Amount"], sent["MinAmount"], sent["ClientToken"]) == ("2", "2", "token-1")
    assert (sent["SpotStrategy"], sent["SpotDuration"], sent["InstanceChargeType"]) == (
        "SpotAsPriceGo",
        "1",
        "PostPaid",
    )
    assert sent["AutoReleaseTime"] == "2026-01-02T03:04:00Z" and sent["InstanceName"] == "c-te[1,1]"
    assert (sent["SystemDisk.Category"], sent["SystemDisk.Size"]) == ("cloud_essd", "60")
    assert (sent["DataDisk.1.SnapshotId"], sent["DataDisk.1.DeleteWithInstance"]) == ("s-1", "False")
    assert "DataDisk.1.Size" not in sent
    assert {sent["Tag.1.Key"]: sent["Tag.1.Value"], sent["Tag.2.Key"]: sent["Tag.2.Value"]} == ORDER.tags


SENT = {"CommandContent": "# a secret of the cluster\n"}


def test_a_script_is_in_the_body_and_never_in_the_url(at):
    with ScriptedApi(refusal(400, "Nothing")) as api, pytest.raises(CloudError):
        at(api).once("RunCommand", SENT, ECS)
    path, body, _ = api.raw[0]
    assert "CommandContent" in body and "CommandContent" not in path


@pytest.mark.parametrize(
    "trouble",
    [
        refusal(503, "ServiceUnavailable"),
        refusal(500, "InternalError"),
        refusal(400, "LastTokenProcessing"),
        Say(502, b"<html><body>Bad Gateway</body></html>"),
        Say(200, b"not JSON at all"),
        Say(200, b"[1, 2]"),
        Say(503, b"null"),
        Say(cut=True),
        Say(late=True),
    ],
    ids=["503", "500", "processing", "html", "garbage", "list", "null", "cut", "time-out"],
)
def test_what_passes_is_asked_again_with_the_same_token(at, trouble):
    with ScriptedApi(trouble, RAN) as api:
        pace = dataclasses.replace(QUICK, read_s=0.5) if getattr(trouble, "late", False) else QUICK
        assert at(api, pace=pace).run(ORDER, "token-1") == ("i-1", "i-2")
    assert [sent["ClientToken"] for _, sent in api.calls] == ["token-1", "token-1"]
    nonces = {headers["x-acs-signature-nonce"] for _, _, headers in api.raw}
    assert len(nonces) == 2 and api.calls[0] == api.calls[1]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (Say(cut=True), "was cut before"),
        (Say(502, b"<html>"), "not the API's"),
        (refusal(503, "ServiceUnavailable", "Later."), "ServiceUnavailable: Later"),
    ],
)
def test_it_does_not_ask_for_ever(at, trouble, words):
    with ScriptedApi(trouble) as api, pytest.raises(CloudError, match=words) as told:
        at(api).run(ORDER, "token-1")
    assert told.value.kind is Kind.PASSING and len(api.calls) == QUICK.passing_attempts


def test_a_server_that_is_gone_is_said_in_a_sentence(at):
    with ScriptedApi(RAN) as api:
        cloud = at(api)
    with pytest.raises(CloudError, match=r"nothing answers at 127\.0\.0\.1") as told:
        cloud.instances()
    assert told.value.kind is Kind.PASSING


def test_throttling_waits_as_long_as_the_cloud_says(at):
    with ScriptedApi(refusal(400, "Throttling.User", x_acs_retry_after="300"), listed(machine())) as api:
        started = time.monotonic()
        assert len(at(api).instances()) == 1
        assert time.monotonic() - started >= 0.3
    assert len(api.calls) == 2


def test_throttling_without_a_time_is_repeated_too_and_ends(at):
    with ScriptedApi(refusal(400, "Throttling")) as api, pytest.raises(CloudError) as told:
        at(api).instances()
    assert told.value.kind is Kind.THROTTLED and len(api.calls) == QUICK.throttled_attempts


def test_what_is_not_ready_is_polled_up_to_a_limit(at):
    waiting = refusal(403, "IncorrectInstanceStatus.Initializing")
    with ScriptedApi(waiting, waiting, Say()) as api:
        at(api).delete("instance", ["i-1"], "token-1")
        assert len(api.calls) == 3
    with ScriptedApi(waiting) as api, pytest.raises(CloudError) as told:
        at(api).delete("instance", ["i-1"], "token-1")
    assert told.value.kind is Kind.WAIT


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("OperationDenied.NoStock", Kind.NO_STOCK),
        ("InvalidAccountStatus.NotEnoughBalance", Kind.MONEY),
        ("InvalidSpotPriceLimit.LowerThanPublicPrice", Kind.PRICE),
        ("SignatureDoesNotMatch", Kind.AUTH),
        ("IdempotentParameterMismatch", Kind.INPUT),
    ],
)
def test_what_does_not_pass_is_said_at_once(at, code, kind):
    with ScriptedApi(refusal(403, code, "Not so.")) as api, pytest.raises(CloudError) as told:
        at(api).run(ORDER, "token-1")
    assert (told.value.kind, told.value.code, told.value.request_id) == (kind, code, "R-9")
    assert len(api.calls) == 1 and "\n" not in str(told.value)


def test_lists_are_read_to_their_last_page(at):
    with ScriptedApi(listed(machine("i-1"), token="next"), listed(machine("i-2"))) as api:
        found = at(api).instances(tags={CLUSTER_TAG: "c"})
    assert [each.instance_id for each in found] == ["i-1", "i-2"]
    assert [sent.get("NextToken") for _, sent in api.calls] == [None, "next"]
    assert all(sent["Tag.1.Key"] == CLUSTER_TAG for _, sent in api.calls)


def test_many_ids_go_a_hundred_a_call_and_none_needs_no_call(at):
    ids = [f"i-{n}" for n in range(250)]
    with ScriptedApi(listed()) as api:
        cloud = at(api)
        cloud.instances(ids=ids)
        assert [json.loads(sent["InstanceIds"]) for _, sent in api.calls] == [ids[:100], ids[100:200], ids[200:]]
        assert cloud.instances(ids=[]) == cloud.disks(ids=[]) == cloud.snapshots(ids=[]) == ()
        assert len(api.calls) == 3


def test_pages_that_are_numbered_are_read_to_their_last(at):
    def page(*names):
        vpcs = [{"VpcId": name, "Status": "Available"} for name in names]
        return Say(body={"RequestId": "R", "TotalCount": 60, "Vpcs": {"Vpc": vpcs}})

    with ScriptedApi(page("vpc-1"), page("vpc-2")) as api:
        assert [vpc.vpc_id for vpc in at(api).vpcs()] == ["vpc-1", "vpc-2"]
    assert [sent["PageNumber"] for _, sent in api.calls] == ["1", "2"]
    assert all(headers["x-acs-version"] == "2016-04-28" for _, _, headers in api.raw)


def test_spot_prices_are_read_by_offset_to_their_end(at):
    def prices(hour, following):
        told = {"ZoneId": "r-h", "InstanceType": "ecs.a", "SpotPrice": 0.1, "OriginPrice": 1}
        told["Timestamp"] = f"2026-01-01T0{hour}:00:00Z"
        return Say(body={"RequestId": "R", "SpotPrices": {"SpotPriceType": [told]}, "NextOffset": following})

    with ScriptedApi(prices(2, 1000), prices(1, 0)) as api:
        assert [price.at.hour for price in at(api).spot_prices("ecs.a")] == [1, 2]
    assert [sent["Offset"] for _, sent in api.calls] == ["0", "1000"]


def test_releasing_goes_on_without_the_machines_that_are_gone(at):
    gone = refusal(404, "InvalidInstanceId.NotFound")
    with ScriptedApi(gone, listed(machine("i-2")), Say()) as api:
        at(api).delete("instance", ["i-1", "i-2"], "token-1")
    first, _, last = (sent for _, sent in api.calls)
    assert (first["InstanceId.2"], last["InstanceId.1"]) == ("i-2", "i-2") and "InstanceId.2" not in last
    assert first["Force"] == "True" and last["ClientToken"] != first["ClientToken"]
    with ScriptedApi(gone, listed()) as api:
        at(api).delete("instance", ["i-1"], "token-1")


def test_releasing_more_than_a_call_takes_uses_a_token_a_call(at):
    with ScriptedApi(Say()) as api:
        at(api).delete("instance", [f"i-{n}" for n in range(150)], "token-1")
    tokens = [sent["ClientToken"] for _, sent in api.calls]
    assert tokens[0] == "token-1" and len(set(tokens)) == 2 and max(map(len, tokens)) <= 64


@pytest.mark.parametrize("method", ["delete_disk", "delete_snapshot"])
def test_removing_what_is_gone_is_no_error(at, method):
    with ScriptedApi(refusal(404, "InvalidDiskId.NotFound")) as api:
        getattr(at(api), method)("x-1")
    with ScriptedApi(refusal(403, "Forbidden.RAM")) as api, pytest.raises(CloudError):
        getattr(at(api), method)("x-1")


def test_a_disk_is_attached_once_although_the_answer_was_lost(at):
    script = [
        listed(disk("Creating"), of="Disk"),
        listed(disk("Available"), of="Disk"),
        Say(cut=True),
        refusal(403, "IncorrectDiskStatus"),
        listed(disk("Attaching", "i-1"), of="Disk"),
        listed(disk("In_use", "i-1"), of="Disk"),
    ]
    with ScriptedApi(*script) as api:
        at(api).attach_disk("d-1", "i-1", delete_with_instance=False)
    assert [action for action, _ in api.calls].count("AttachDisk") == 2


def test_a_disk_that_another_machine_has_is_not_waited_for(at):
    with ScriptedApi(listed(disk("In_use", "i-2"), of="Disk")) as api, pytest.raises(CloudError, match="i-2"):
        at(api).attach_disk("d-1", "i-1", delete_with_instance=False)


def assistant(status):
    told = {"InstanceId": "i-1", "CloudAssistantStatus": status}
    return Say(body={"InstanceCloudAssistantStatusSet": {"InstanceCloudAssistantStatus": [told]}})


def invocation(**told):
    return Say(body={"Invocation": {"InvocationResults": {"InvocationResult": [told]}}})


def test_a_command_waits_for_the_assistant_and_its_end(at):
    output = base64.b64encode(b"ssh-ed25519 AAAA\n").decode()
    script = [assistant("false"), assistant("true"), Say(body={"InvokeId": "t-1"})]
    script += [
        invocation(InvocationStatus="Running"),
        invocation(InvocationStatus="Success", ExitCode=0, Output=output),
    ]
    with ScriptedApi(*script) as api:
        assert at(api).run_command("i-1", "cat /etc/ssh/ssh_host_*_key.pub") == "ssh-ed25519 AAAA\n"
    sent = next(sent for action, sent in api.calls if action == "RunCommand")
    assert base64.b64decode(sent["CommandContent"]).decode() == "cat /etc/ssh/ssh_host_*_key.pub"
    assert sent["ClientToken"]


def test_a_command_that_fails_says_what_it_printed(at):
    failed = invocation(InvocationStatus="Failed", ExitCode=3, Output=base64.b64encode(b"no such file").decode())
    with ScriptedApi(assistant("true"), Say(body={"InvokeId": "t-1"}), failed) as api:
        with pytest.raises(CloudError, match="ended with 3: no such file"):
            at(api).run_command("i-1", "false")


def test_a_machine_whose_assistant_never_runs_is_named(at):
    with ScriptedApi(assistant("false")) as api, pytest.raises(CloudError, match="i-1: its Cloud Assistant") as told:
        at(api).run_command("i-1", "true")
    assert told.value.kind is Kind.WAIT


def test_importing_a_key_twice_gives_the_one_that_is_there(at):
    pair = {"KeyPairName": "c-key", "KeyPairFingerPrint": "ab"}
    there = Say(body={"TotalCount": 1, "KeyPairs": {"KeyPair": [pair]}})
    with ScriptedApi(Say(cut=True), refusal(403, "KeyPair.AlreadyExist"), there) as api:
        assert at(api).import_key_pair("c-key", "ssh-ed25519 AAAA", {}) == "c-key"


def test_a_rule_goes_out_by_its_kind_of_source(at):
    with ScriptedApi(Say()) as api:
        cloud = at(api)
        cloud.allow("sg-1", Rule("tcp", "22/22", "198.51.100.7/32"))
        cloud.allow("sg-1", Rule("tcp", "22/22", "2001:db8::/64"))
        cloud.allow("sg-1", Rule("all", "-1/-1", "sg-2"))
        cloud.revoke("sg-1", Rule("tcp", "22/22", "198.51.100.7/32", rule_id="sgr-1"))
    sent = [fields for _, fields in api.calls]
    assert (sent[0]["Permissions.1.SourceCidrIp"], sent[0]["Permissions.1.IpProtocol"]) == ("198.51.100.7/32", "TCP")
    assert sent[1]["Permissions.1.Ipv6SourceCidrIp"] == "2001:db8::/64"
    assert sent[2]["Permissions.1.SourceGroupId"] == "sg-2"
    assert sent[3]["SecurityGroupRuleId.1"] == "sgr-1"


def test_an_image_is_found_by_family_and_the_newest_is_taken(at):
    def image(name, made):
        return {"ImageId": name, "CreationTime": made, "Size": 20}

    both = [image("m-old", "2024-01-01T00:00:00Z"), image("m-new", "2025-01-01T00:00:00Z")]
    found = Say(body={"TotalCount": 2, "Images": {"Image": both}})
    with ScriptedApi(found) as api:
        assert at(api).image("acs:ubuntu_22_04_x64").image_id == "m-new"
    assert api.calls[0][1]["ImageFamily"] == "acs:ubuntu_22_04_x64"
    with ScriptedApi(Say(body={"TotalCount": 0})) as api, pytest.raises(CloudError, match="no image 'nothing'"):
        at(api).image("nothing")


def test_a_disk_price_is_a_months_and_none_where_the_cloud_does_not_tell(at):
    told = Say(body={"PriceInfo": {"Price": {"TradePrice": 0.01, "OriginalPrice": 0.02, "Currency": "USD"}}})
    with ScriptedApi(told) as api:
        price = at(api).disk_price_month("cloud_essd", 120, "PL1", "r-h")
    assert (round(price.trade, 4), round(price.list, 4), price.currency) == (7.3, 14.6, "USD")
    assert api.calls[0][1]["DataDisk.1.Size"] == "120"
    with ScriptedApi(refusal(400, "PriceNotFound")) as api:
        assert at(api).disk_price_month("cloud_essd", 120, "PL1", "r-h") is None


def test_several_machines_are_numbered_by_the_cloud_and_one_is_not():
    assert ordered_name(["demo-te2", "demo-te3", "demo-te4"]) == "demo-te[2,1]"
    assert ordered_name(["demo-te8", "demo-te9", "demo-te10"]) == "demo-te[8,2]", "te08, te09, te10"
    assert ordered_name(["demo-te2"]) == "demo-te2"


def test_every_field_of_ours_is_one_the_vendors_models_know(at):
    """Each method once: an unknown field would raise before it is sent."""
    body = {"TotalCount": 0, "DiskId": "d-1", "SnapshotId": "s-1", "SecurityGroupId": "sg-1", "VpcId": "vpc-1"}
    body |= {"KeyPairName": "k", "PriceInfo": {"Price": {"TradePrice": 1}}, "VSwitchId": "vsw-1"}
    with ScriptedApi(Say(body=body)) as api:
        cloud = at(api)
        cloud.start(["i-1"])
        cloud.set_release_time("i-1", None)
        assert api.calls[-1][1]["AutoReleaseTime"] == ""
        cloud.disk_categories("r-h", "ecs.a")
        grown = NewDisk("cloud_auto", 200, "", "s-1", name="x")
        assert cloud.create_disk("r-h", grown, {"a": "b"}, "token") == "d-1"
        assert api.calls[-1][1] | {"Size": "200", "SnapshotId": "s-1", "ClientToken": "token"} == api.calls[-1][1]
        assert cloud.create_snapshot("d-1", "name", {"a": "b"}, "token") == "s-1"
        assert cloud.types(["ecs.a"]) == cloud.stock("ecs.a", True) == cloud.spot_advice(["ecs.a"]) == ()
        assert cloud.key_pairs({"a": "b"}) == () and cloud.key_pair("k") is None
        limited = dataclasses.replace(ORDER, price_limit=0.12345)
        assert cloud.price(limited).trade == 1
        cloud.run(limited, "token")
        assert api.calls[-1][1]["SpotPriceLimit"] == "0.123"
        assert cloud.create_security_group("vpc-1", "name", {"a": "b"}, "token") == "sg-1"
        assert cloud.security_groups(tags={"a": "b"}, vpc_id="vpc-1") == cloud.rules("sg-1") == ()
        assert cloud.subnets("vpc-1") == cloud.snapshots(disk_id="d-1") == cloud.disks(instance_id="i-1") == ()
        cloud.delete_key_pair("k")
        cloud.tag("disk", ["d-1"], {"a": "b"})


def test_a_proxy_in_the_environment_is_not_used_for_this_very_machine(at, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ScriptedApi(listed(machine())) as api:
        assert len(at(api).instances()) == 1


def test_answers_and_errors_are_recorded_without_their_owner(at, tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTUNE_ECS_RECORD", str(tmp_path / "record"))
    told = machine("i-bp1h4adlltjc1d48goaq") | {"InstanceName": "alice"}
    with ScriptedApi(listed(told), refusal(404, "InvalidDiskId.NotFound", "No disk d-bp1h4adlltjc1d48goaq.")) as api:
        cloud = at(api)
        cloud.instances()
        cloud.delete_disk("d-bp1h4adlltjc1d48goaq")
    files = {path.name: path.read_text() for path in (tmp_path / "record").iterdir()}
    assert sorted(files) == ["DeleteDisk-001.json", "DescribeInstances-001.json"]
    assert "alice" not in str(files) and "bp1h4adlltjc1d48goaq" not in str(files)
    assert json.loads(files["DeleteDisk-001.json"])["Code"] == "InvalidDiskId.NotFound"


def test_no_error_log_or_traceback_carries_the_secret(at, capfd, caplog, monkeypatch):
    monkeypatch.setenv("DEBUG", "sdk")
    caplog.set_level(logging.DEBUG)
    for answer in (
        refusal(400, "SignatureDoesNotMatch", "to sign is: CommandContent%3D"),
        Say(cut=True),
        Say(502, b"<html>"),
    ):
        with ScriptedApi(answer) as api:
            with pytest.raises(CloudError) as told:
                at(api).once("RunCommand", SENT, ECS)
        shown = "".join(traceback.TracebackException.from_exception(told.value, capture_locals=False).format())
        assert SECRET not in shown and "a secret of" not in shown and "CommandContent" not in shown
        assert told.value.__cause__ is None and told.value.__suppress_context__
    out, err = capfd.readouterr()
    for text in (out, err, caplog.text, repr(vars(told.value))):
        assert SECRET not in text and "Authorization" not in text and "LTAItest" not in text


def test_the_local_cloud_that_does_not_run_is_said_in_one_sentence(at, tmp_path):
    settings = Settings(name="nowhere", provider="aliyun", aliyun=Aliyun(endpoint="local"))
    with pytest.raises(RentError, match=r"^the local cloud that cluster.toml names does not run: fab local\.serve$"):
        Ecs.open(settings)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with ScriptedApi() as api, pytest.raises(RentError, match="does not run"):
        at(api, pid=ended.pid)


OPEN = """
import sys
from inventory.aliyun_settings import Aliyun
from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import RentError
from inventory.settings import Settings
try:
    cloud = Ecs.open(Settings(provider="aliyun", aliyun=Aliyun(endpoint=sys.argv[1])))
    print(len(cloud.instances()))
except RentError as error:
    print(error)
"""


def opened_elsewhere(tmp_path, endpoint, before="", **variables):
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ALIBABA_", "ALICLOUD_")) and "proxy" not in k.lower()
    }
    env = clean | {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), **variables}
    told = subprocess.run(
        [sys.executable, "-c", before + OPEN, endpoint], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return (told.stdout + told.stderr).strip()


def test_credentials_come_from_the_sdks_own_chain(tmp_path):
    keys = {"ALIBABA_CLOUD_ACCESS_KEY_ID": "LTAIenv", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": SECRET}
    with ScriptedApi(listed(machine())) as api:
        assert opened_elsewhere(tmp_path, f"http://{api.endpoint}", **keys) == "1"
    assert "Credential=LTAIenv" in api.raw[0][2]["Authorization"]


def test_without_credentials_it_is_said_where_they_go_and_no_metadata_server_is_asked(tmp_path):
    watch = (
        "import socket\n"
        "def refuse(*given, **options): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
    )
    told = opened_elsewhere(tmp_path, "http://127.0.0.1:9", before=watch)
    assert "ALIBABA_CLOUD_ACCESS_KEY_ID" in told and "~/.alibabacloud/credentials.ini" in told and "\n" not in told


INI = f"[default]\ntype = access_key\naccess_key_id = LTAIini\naccess_key_secret = {SECRET}\n"
OTHERS_KEY = {"access_key_id": "LTAIother", "access_key_secret": SECRET}
KEY_ID, KEY_SECRET = "ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET"


def profile(**fields):
    own = {"name": "work", "mode": "AK", "ram_role_arn": "acs:ram::1:role/x", "ram_session_name": "s", **fields}
    return json.dumps({"current": "work", "profiles": [own, {"name": "private", "mode": "AK", **OTHERS_KEY}]})


@pytest.mark.parametrize(
    ("config", "variables", "reason"),
    [
        (profile(**OTHERS_KEY), {KEY_ID: "LTAIx"}, KEY_SECRET),
        (profile(**OTHERS_KEY), {KEY_ID: "LTAIx", KEY_SECRET: ""}, KEY_SECRET),
        (profile(**OTHERS_KEY), {KEY_SECRET: SECRET}, KEY_ID),
        (profile(**OTHERS_KEY), {"ALIBABA_CLOUD_OIDC_TOKEN_FILE": "/gone"}, "ALIBABA_CLOUD_ROLE_ARN"),
        (profile(**OTHERS_KEY), {"ALIBABA_CLOUD_PROFILE": "wrok"}, "'wrok'"),
        (profile(mode="External", process_command="false"), {}, "exit status 1"),
        (profile(mode="ChainableRamRoleArn", source_profile="gone"), {}, "'gone'"),
        (profile(mode="RamRoleArn", sts_region="nowhere-1", **OTHERS_KEY), {}, "sts.nowhere-1.aliyuncs.com"),
        ("{", {}, "config.json"),
    ],
)
def test_credentials_that_are_set_up_and_fail_are_not_passed_over_for_others(tmp_path, config, variables, reason):
    for name, text in ((".aliyun/config.json", config), (".alibabacloud/credentials.ini", INI)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    with ScriptedApi(listed(machine())) as api:
        message = opened_elsewhere(tmp_path, f"http://{api.endpoint}", **variables)
    assert reason in message and "\n" not in message and "Signature" not in message
    assert not api.calls


def test_without_the_sdk_it_is_said_how_to_install_it(tmp_path):
    before = "import sys\nsys.modules['alibabacloud_credentials'] = None\n"
    told = opened_elsewhere(tmp_path, "http://127.0.0.1:9", before=before)
    assert told.endswith("pip install -e '.[aliyun]'") and "\n" not in told


def test_the_module_itself_imports_no_sdk():
    sdk = "[m for m in sys.modules if m.startswith(('alibabacloud', 'darabonba'))]"
    code = f"import sys, inventory.aliyun_ecs.client; print({sdk})"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_region_has_the_vendors_own_addresses(at):
    from alibabacloud_ecs20140526.client import Client
    from alibabacloud_tea_openapi.utils_models import Config

    def vendors(region):
        return Client(Config(access_key_id="a", access_key_secret="b", region_id=region))

    inner = re.compile(r"-(pop|inner|internal|test|nebula|oxs|edge|fujian|zhangbei|yushanfang)\b|-[a-z]+[0-9]+(-|$)")
    rented = [region for region in vendors("cn-beijing")._endpoint_map if not inner.search(region)]
    assert len(rented) == 7
    for region in (*rented, "cn-beijing", "ap-southeast-5"):
        assert host_of(ECS, region) == vendors(region)._endpoint
        assert host_of(VPC, region) == ("vpc.aliyuncs.com" if region in rented else f"vpc.{region}.aliyuncs.com")
        assert host_of(STS, region) == f"sts.{region}.aliyuncs.com"


def test_the_proxy_and_the_certificates_of_the_environment_are_the_sdks(tmp_path, monkeypatch):
    from inventory.aliyun_ecs.caller import Endpoint

    (tmp_path / "ca.pem").touch()
    (tmp_path / "keys.ini").write_text(INI)
    monkeypatch.setenv("CURL_CA_BUNDLE", str(tmp_path / "ca.pem"))
    for name in ("HTTPS_PROXY", "https_proxy", "all_proxy", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    where = Endpoint("ecs.example", credentials=tmp_path / "keys.ini")
    cloud = Ecs("cn-beijing", where, QUICK, None)
    ways = {(client._https_proxy, client._ca) for client in cloud._sdk._clients.values()}
    assert ways == {("http://127.0.0.1:9", str(tmp_path / "ca.pem"))}
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:7891")
    with pytest.raises(RentError, match="ALL_PROXY"):
        Ecs("cn-beijing", where, QUICK, None)


@pytest.mark.parametrize("region", ["cn-beijing", "cn-hangzhou"])
def test_the_cloud_is_asked_without_a_proxy_where_no_proxy_names_it(tmp_path, monkeypatch, region):
    from darabonba.exceptions import UnretryableException

    from inventory.aliyun_ecs.caller import Endpoint

    def send(self, request, **options):
        ways.append(options["proxies"])
        raise OSError

    ways = []
    (tmp_path / "keys.ini").write_text(INI)
    for name in ("https_proxy", "no_proxy", *internet.CA_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("requests.adapters.HTTPAdapter.send", send)
    monkeypatch.setattr("darabonba.core.DaraCore._sessions", {})
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for named in (".example", ".aliyuncs.com"):
        monkeypatch.setenv("NO_PROXY", f"localhost,{named}")
        cloud = Ecs(region, Endpoint("", credentials=tmp_path / "keys.ini"), QUICK, None)
        for version in (ECS, VPC, STS):
            with pytest.raises(UnretryableException):
                cloud._sdk.send("DescribeRegions", {}, version)
    assert [bool(way) for way in ways] == [True] * (len(ways) // 2) + [False] * (len(ways) // 2)
    assert len(ways) >= 6


UNKNOWN = refusal(404, "InvalidInstanceId.NotFound")


def test_what_was_made_a_moment_ago_and_is_not_known_is_not_taken_for_deleted(at):
    with ScriptedApi(RAN, UNKNOWN, UNKNOWN, Say()) as api:
        cloud = at(api)
        cloud.run(ORDER, "t")
        cloud.delete("instance", ["i-1", "i-2"], "u")
    assert [action for action, _ in api.calls] == ["RunInstances", *["DeleteInstances"] * 3]
    made = Say(body={"RequestId": "R", "DiskId": "d-1"})
    with ScriptedApi(made, refusal(404, "InvalidDiskId.NotFound"), Say()) as api:
        cloud = at(api)
        cloud.create_disk("r-h", NewDisk("cloud_essd", 20, "PL1"), {}, "t")
        cloud.delete_disk("d-1")
    assert [action for action, _ in api.calls] == ["CreateDisk", "DeleteDisk", "DeleteDisk"]


@pytest.mark.parametrize(("first", "kept"), [(Say(cut=True), True), (refusal(400, "Throttling"), False)])
@pytest.mark.parametrize("code", ["SignatureNonceUsed", "InvalidSecurityToken.Expired", "OperationDenied.NoStock"])
def test_a_refused_repetition_says_nothing_of_the_attempt_before(at, tmp_path, first, kept, code):
    with ScriptedApi(first, refusal(403, code)) as api:
        cloud, intents = at(api), Intents(tmp_path / "intents.json")
        with pytest.raises(CloudError), intents.begun("machines te1 x 1", ORDER) as token:
            cloud.run(ORDER, token)
    assert bool(intents.pending()) == kept


def test_a_key_pair_that_hangs_on_released_machines_is_waited_for(at):
    with ScriptedApi(refusal(400, "InvalidParameter.KeypairAlreadyAttachedInstance"), Say()) as api:
        at(api).delete_key_pair("c-key")
    assert len(api.calls) == 2


def test_a_key_pair_whose_name_is_still_taken_is_asked_for_again(at):
    taken, none = refusal(403, "KeyPair.AlreadyExist"), Say(body={"KeyPairs": {"KeyPair": []}, "TotalCount": 0})
    made = Say(body={"RequestId": "R", "KeyPairName": "c-key", "KeyPairFingerPrint": "f"})
    with ScriptedApi(taken, none, made) as api:
        assert at(api).import_key_pair("c-key", "ssh-rsa AAAA", {}) == "c-key"
    with ScriptedApi(taken, none, taken, none) as api, pytest.raises(CloudError, match="still holds the name") as told:
        at(api, pace=dataclasses.replace(QUICK, listed_s=0)).import_key_pair("c-key", "ssh-rsa AAAA", {})
    assert told.value.kind is Kind.WAIT


@pytest.mark.parametrize("code", ["OperationFailed.DistibuteLock", "CreateVSwitch.IncorrectStatus.cbnStatus"])
def test_a_subnet_is_asked_for_again_while_the_network_is_busy(at, code):
    with ScriptedApi(refusal(400, code), Say(body={"RequestId": "R", "VSwitchId": "vsw-1"})) as api:
        assert at(api).create_subnet("vpc-1", "r-h", "172.16.0.0/20", "n", "t") == "vsw-1"
