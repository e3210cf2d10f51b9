"""Every documented error falls into a class, and the class tells the user what to do."""

import csv

import pytest

from inventory.aliyun_ecs.errors import ADVICE, classify, no_answer, sentence
from inventory.cloud.errors import Kind
from inventory.cloud.pace import CallPace, goes_on, pause_s
from tests.support.ecs_samples import FOLDER, needs_samples


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("Throttling", 400, Kind.THROTTLED),
        ("Throttling.User", 400, Kind.THROTTLED),
        ("Throttling.ConcurrentLimitExceeded", 403, Kind.THROTTLED),
        ("Rejected.Throttling", 503, Kind.THROTTLED),
        ("Whatever.New", 429, Kind.THROTTLED),
        ("ServiceUnavailable", 503, Kind.PASSING),
        ("InternalError", 400, Kind.PASSING),
        ("LastTokenProcessing", 403, Kind.PASSING),
        ("OperationDenied.CreatingConflict", 404, Kind.PASSING),
        ("SystemBusy", 400, Kind.PASSING),
        ("OperationFailed.LastTokenProcessing", 400, Kind.PASSING),
        ("OperationFailed.Throttling", 400, Kind.THROTTLED),
        ("IncorrectStatus.Vpc", 400, Kind.WAIT),
        ("IncorrectStatus", 409, Kind.WAIT),
        ("IncorrectRouteTableStatus", 400, Kind.WAIT),
        ("ClientNotRunning", 400, Kind.WAIT),
        ("Whatever.New", 502, Kind.PASSING),
        ("IncorrectInstanceStatus.Initializing", 403, Kind.WAIT),
        ("IncorrectDiskStatus.CreatingSnapshot", 403, Kind.WAIT),
        ("InvalidSnapshotId.NotReady", 403, Kind.WAIT),
        ("OperationDenied.NoStock", 403, Kind.NO_STOCK),
        ("Zone.NotOnSale", 400, Kind.NO_STOCK),
        ("InvalidInstanceType.ZoneNotSupported", 403, Kind.NO_STOCK),
        ("QuotaExceeded.PrivateIpAddress", 400, Kind.NO_STOCK),
        ("InvalidSpotPriceLimit.LowerThanPublicPrice", 403, Kind.PRICE),
        ("InvalidInstanceType.NotSupportDiskCategory", 400, Kind.DISK_KIND),
        ("InvalidDataDiskCategory.NotSupported", 403, Kind.DISK_KIND),
        ("InvalidAccountStatus.NotEnoughBalance", 403, Kind.MONEY),
        ("QuotaExceed.ElasticQuota", 403, Kind.QUOTA),
        ("QuotaExceeded.Vpc", 400, Kind.QUOTA),
        ("InvalidResourceType.NotSupported", 403, Kind.NO_STOCK),
        ("ZoneId.NotFound", 403, Kind.NO_STOCK),
        ("InvalidVpcZone.NotSupported", 403, Kind.NO_STOCK),
        ("ImageNotSupportInstanceType", 403, Kind.NO_STOCK),
        ("OperationDenied.DiskCategoryNotSupport", 403, Kind.DISK_KIND),
        ("OperationDenied.CloudSSDNotSupported", 403, Kind.DISK_KIND),
        ("OperationFailed.DistibuteLock", 400, Kind.PASSING),
        ("OperationFailed.NotifyCenCreate", 400, Kind.PASSING),
        ("OperationDenied.OtherSubnetProcessing", 400, Kind.PASSING),
        ("IdempotenceProcessing", 400, Kind.PASSING),
        ("InnerServiceFailed", 400, Kind.PASSING),
        ("TaskConflict", 400, Kind.PASSING),
        ("CreateVSwitch.IncorrectStatus.cbnStatus", 400, Kind.WAIT),
        ("InvalidStatus.RouteEntry", 400, Kind.WAIT),
        ("InvalidStatus.DiskNotReady", 403, Kind.WAIT),
        ("DisksDetachingOnEcsExceeded", 403, Kind.WAIT),
        ("InvalidParameter.KeypairAlreadyAttachedInstance", 400, Kind.WAIT),
        ("Forbidden.InstanceNotFound", 404, Kind.NOT_FOUND),
        ("InstanceLockedForSecurity", 403, Kind.MONEY),
        ("InvalidOperation.DeletionProtection", 403, Kind.MONEY),
        ("UnauthorizedRegion", 403, Kind.AUTH),
        ("InvalidAction.NotFound", 404, Kind.INPUT),
        ("InvalidSomething.NotSupported", 403, Kind.UNKNOWN),
        ("OperationDenied.Whatever", 403, Kind.UNKNOWN),
        ("OperationDenied", 403, Kind.UNKNOWN),
        ("Account.Arrearage", 403, Kind.MONEY),
        ("RealNameAuthenticationError", 403, Kind.MONEY),
        ("InvalidAccessKeyId.NotFound", 404, Kind.AUTH),
        ("Forbidden.RAM", 403, Kind.AUTH),
        ("SignatureDoesNotMatch", 400, Kind.AUTH),
        ("SignatureNonceUsed", 400, Kind.AUTH),
        ("InvalidInstanceId.NotFound", 404, Kind.NOT_FOUND),
        ("IncorrectDiskStatus.NeverAttached", 403, Kind.INPUT),
        ("IdempotentParameterMismatch", 400, Kind.INPUT),
        ("MissingParameter", 400, Kind.INPUT),
        (None, None, Kind.PASSING),
        ("None", 502, Kind.PASSING),
        ("", 429, Kind.THROTTLED),
        ("", 404, Kind.INPUT),
    ],
)
def test_an_error_falls_into_its_class(code, status, kind):
    assert classify(code, status) is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The resource is out of usage.", Kind.NO_STOCK),
        ("Sales of this resource are temporarily suspended in the specified region.", Kind.NO_STOCK),
        ("Sale of this resource is temporarily suspended in the specified zone.", Kind.NO_STOCK),
        ("The creation of Instance to the specified Zone is not allowed.", Kind.NO_STOCK),
        ("No additional quota is available for the specified ECS instance type.", Kind.QUOTA),
        ("The current user does not support this operation.", Kind.UNKNOWN),
    ],
)
def test_a_code_that_says_nothing_is_told_by_the_vendors_sentence(message, kind):
    assert classify("OperationDenied", 403, message) is kind


def test_an_unknown_code_is_named_as_unknown_with_the_vendors_words():
    told = sentence("RunInstances", "Brand.New", "The moon is full.", Kind.UNKNOWN)
    assert "Brand.New: The moon is full" in told and "does not recognise this error code" in told


@needs_samples
def test_every_documented_error_has_a_class_and_the_dear_ones_the_right_one():
    with (FOLDER / "error_codes_2021docs.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) == 668
    classes = {(row["code"], row["http"]): classify(row["code"], int(row["http"]), row["message"]) for row in rows}
    for (code, status), kind in classes.items():
        if "Throttling" in code:
            assert kind is Kind.THROTTLED, code
        elif status.startswith("5") and not code.startswith(("Invalid", "Missing", "InstanceNotReady")):
            assert kind is Kind.PASSING, code
        if "NoStock" in code or code.startswith("Zone."):
            assert kind is Kind.NO_STOCK, code
        if code.startswith(("InvalidAccountStatus", "InsufficientBalance", "Account.")):
            assert kind is Kind.MONEY, code
        if "Quota" in code and "PrivateIp" not in code:
            assert kind is Kind.QUOTA, code
        if kind is Kind.UNKNOWN:  # it is named so: what the vendor lists is known but for what no code says
            assert code == "OperationDenied" or code.endswith(("NotSupport", "NotSupported")), code
        if "DiskCategory" in code and code not in ("InvalidDiskCategory.Mismatch",):
            assert kind in (Kind.DISK_KIND, Kind.INPUT), code
        if kind in (Kind.PASSING, Kind.WAIT):  # repeated by itself: nothing that a repetition cannot mend
            assert "Malformed" not in code and "NotFound" not in code and "Never" not in code, code
    assert set(classes.values()) == set(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_every_class_has_advice(kind):
    assert ADVICE[kind] in sentence("RunInstances", "Some.Code", "No.", kind)


def test_a_sentence_says_what_was_asked_the_answer_and_what_to_do():
    told = sentence("RunInstances", "OperationDenied.NoStock", "Sold\nout there.", Kind.NO_STOCK, "R-1")
    assert told.startswith("RunInstances: OperationDenied.NoStock: Sold out there; ") and told.endswith("(request R-1)")
    assert "[aliyun]" in told and "\n" not in told
    assert "?;" not in sentence("RunInstances", "InternalError", "Is it there?", Kind.PASSING)


def test_a_wrong_signature_does_not_quote_the_request():
    quoted = "server string to sign is:POST&%2F&AccessKeyId%3Dabc%26UserData%3Dhidden"
    told = sentence("RunInstances", "SignatureDoesNotMatch", quoted, Kind.AUTH)
    assert "hidden" not in told and "AccessKeyId" not in told and "secret is wrong" in told


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("HTTPConnectionPool(host='h', port=80): Read timed out. (read timeout=20.0)", Kind.PASSING, "within 20 s"),
        ("Failed to establish a new connection: [Errno 111] Connection refused", Kind.PASSING, "nothing answers at"),
        ("('Connection aborted.', ConnectionResetError(104))", Kind.PASSING, "cut before"),
        ("Failed to resolve 'ecs.nowhere-1.aliyuncs.com'", Kind.PASSING, "region's name"),
        ("Expecting value: line 1 column 1 (char 0)", Kind.PASSING, "not the API's"),
        ("'NoneType' object has no attribute 'get'", Kind.PASSING, "not the API's"),
        ("Unable to connect to proxy: Connection refused", Kind.PASSING, "HTTP_PROXY"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", Kind.INPUT, "not trusted"),
        ("unable to load credentials from any of the providers", Kind.AUTH, "credentials"),
        ("", Kind.PASSING, "cut before"),
    ],
)
def test_no_answer_has_words_of_its_own(said, kind, words):
    found, told = no_answer("RunInstances", said + " url: /?UserData=hidden", "ecs.example", 20)
    assert found is kind and words in told and told.startswith("RunInstances: ") and "hidden" not in told


def test_a_name_that_cannot_be_found_is_not_said_to_pass():
    kind, told = no_answer("DescribeInstances", "Failed to resolve 'ecs.nowhere-1.aliyuncs.com'", "ecs.example", 20)
    assert kind is Kind.PASSING and told.endswith("region's name right?") and "usually passes" not in told


def test_patience_has_an_end():
    pace = CallPace()
    assert goes_on(pace, Kind.PASSING, 1, 0) and not goes_on(pace, Kind.PASSING, pace.passing_attempts, 0)
    assert goes_on(pace, Kind.THROTTLED, 1, 0) and not goes_on(pace, Kind.THROTTLED, pace.throttled_attempts, 0)
    assert goes_on(pace, Kind.WAIT, 99, 299) and not goes_on(pace, Kind.WAIT, 1, 300)
    for kind in set(Kind) - {Kind.PASSING, Kind.THROTTLED, Kind.WAIT}:
        assert not goes_on(pace, kind, 1, 0)


def test_throttling_is_waited_out_for_longer_than_the_minute_it_counts():
    pace = CallPace()
    waits = [pause_s(pace, Kind.THROTTLED, n, 0, 0) for n in range(1, pace.throttled_attempts)]
    assert waits == sorted(waits) and sum(waits) * 2 > 60 and max(waits) <= pace.longest_s


def test_the_cloud_says_how_long_it_wants_to_be_left_alone_within_reason():
    pace = CallPace()
    assert 1.5 <= pause_s(pace, Kind.THROTTLED, 1, 1.5, 0.5) <= 2
    assert pause_s(pace, Kind.THROTTLED, 1, 86_400, 1) <= pace.throttled_s + pace.first_s


def test_what_was_refused_together_does_not_come_back_together():
    pace = CallPace()
    assert pause_s(pace, Kind.PASSING, 3, 0, 0) < pause_s(pace, Kind.PASSING, 3, 0, 1)
