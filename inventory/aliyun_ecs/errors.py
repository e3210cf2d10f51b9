"""The codes of the API's errors, and calls without an answer of it: of which class each is, and what a user is told
about it, in our words: those of HTTP libraries quote URLs. Pure."""

from __future__ import annotations

import re

from inventory.cloud.errors import LATER, Kind

DRY_SUCCESS = ("DryRunOperation", "DRYRUN.SUCCESS")
"""A dry run that would succeed is answered with one of these errors."""

RULES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.THROTTLED, re.compile(r"Throttling|Rejected\.Throttling|FlowControl")),
    # Conditions that never pass, before the classes whose names they begin with.
    (
        Kind.INPUT,
        re.compile(
            r"IdempotentParameterMismatch|IncorrectDiskStatus\.(Never|Invalid)|IncorrectDiskType"
            r"|InvalidInstanceType\.(ElasticNetworkInterface|Missing)"
        ),
    ),
    (
        Kind.PASSING,
        re.compile(
            r"ServiceUnavailable|ServiceTimeout|InternalError|UnknownError|LastTokenProcessing|IdempotentProcessing"
            r"|Operation\.?Conflict|TaskConflict|InvalidOperation\.Conflict|OperationDenied\.CreatingConflict"
            r"|NodeControllerUnavailable"
        ),
    ),
    (
        Kind.DISK_KIND,
        re.compile(
            r"InvalidInstanceType\.NotSupportDiskCategory|Invalid(System|Data)?DiskCategory|InvalidDiskSizeOrCategory"
            r"|InvalidPerformanceLevel|CategoryNotSupported|DiskCategory\."
            r"|OperationDenied\.(PerformanceLevelNotMatch|DiskTypeNotSupport|ZoneSystemCategoryNotMatch)"
        ),
    ),
    (
        Kind.NO_STOCK,
        re.compile(
            r"OperationDenied\.(NoStock|ResourceControl|ZoneNotAllowed)|Zone\.NotO(nSale|pen)|ResourceNotAvailable"
            r"|InvalidInstanceType\.|InstanceType\.Offline|QuotaExceeded\.PrivateIpAddress|PriceNotFound"
        ),
    ),
    (
        Kind.PRICE,
        re.compile(r"InvalidSpot(PriceLimit|AliUid|Authorized)|OperationDenied\.SpotPrice|Abs\.Abs\.InvalidSpot"),
    ),
    (
        Kind.WAIT,
        re.compile(
            r"Incorrect(Instance|Disk|Volume|Vpc|VSwitch|Snapshot)Status"
            r"|InvalidSnapshot(Id)?\.NotReady|InvalidStatus\.Upgrading|DiskCreatingSnapshot|DiskInCoolingPeriod"
            r"|DiskError|InstanceNotReady|InvalidHpcClusterId\.Creating"
        ),
    ),
    (
        Kind.MONEY,
        re.compile(
            r"InvalidAccountStatus|InsufficientBalance|Account\.Arrearage|QuotaExceed|OperationDenied\.QuotaExceed"
            r"|RealNameAuthenticationError|PaymentMethodNotFound|InvalidPayMethod|InvalidInstance\.UnPaidOrder"
            r"|InstanceExpired|DiskInArrears|SecurityRisk|Forbidden\.RiskControl"
        ),
    ),
    (
        Kind.AUTH,
        re.compile(
            r"InvalidAccessKeyId|InvalidSecurityToken|SignatureDoesNotMatch|IncompleteSignature|IllegalTimestamp"
            r"|InvalidTimeStamp|SignatureNonceUsed|InvalidCredentials|NoPermission|UserNotInTheWhiteList"
            r"|Forbidden|Forbbiden|Forbedden"  # the last two are the API's own spellings
            r"|RegionUnauthorized|InvalidAction\.Unauthorized|InvalidUser\.PassRoleForbidden"
        ),
    ),
    # What passes by itself wherever in the code it is said: OperationFailed.Throttling, IncorrectStatus.Vpc.
    (Kind.THROTTLED, re.compile(".*Throttling")),
    (Kind.PASSING, re.compile(".*(LastTokenProcessing|SystemBusy)")),
    (Kind.WAIT, re.compile(r"Incorrect\w*Status\b|.*ClientNotRunning")),
)
"""The classes by how a code begins; the first that fits counts."""
NOT_FOUND_ENDINGS = (".NotFound", ".NotExist", "NotFound")


def classify(code: str | None, http_status: int | None, message: str = "") -> Kind:
    """The class of an error by the beginning of its code; without a code by the HTTP status; without both
    (time-outs, cut connections, answers that are not the API's) it is passing.
    """
    if not code or code == "None":
        return _by_status(http_status)
    for kind, beginning in RULES:
        if beginning.match(code):
            return kind
    if http_status == 429:
        return Kind.THROTTLED
    if http_status is not None and http_status >= 500 and not code.startswith(("Invalid", "Missing")):
        return Kind.PASSING
    if code == "OperationDenied" and "out of usage" in message:
        return Kind.NO_STOCK
    if code.endswith(NOT_FOUND_ENDINGS):
        return Kind.NOT_FOUND
    return Kind.INPUT


def _by_status(http_status: int | None) -> Kind:
    if http_status == 429:
        return Kind.THROTTLED
    return Kind.PASSING if http_status is None or http_status >= 500 else Kind.INPUT


ADVICE = {
    Kind.THROTTLED: "the account made too many calls: try again in a minute",
    Kind.PASSING: "this usually passes: run the same command again, nothing is made twice",
    Kind.WAIT: LATER,
    Kind.NO_STOCK: "sold out there: add other types or zones under [aliyun] in cluster.toml, or try later",
    Kind.PRICE: 'change spot, price_limit or spot_duration_h under [aliyun] in cluster.toml (spot = "as-price-goes" '
    "never pays more than the list price)",
    Kind.DISK_KIND: "the machine type or zone takes other disks: change disk_category or performance_level under "
    "[aliyun] in cluster.toml",
    Kind.MONEY: "see to it in the cloud's console (balance, quota, real-name authentication, services to be opened), "
    "then run the same command again",
    Kind.AUTH: "check the access key and its permissions (AliyunECSFullAccess, AliyunVPCFullAccess)",
    Kind.NOT_FOUND: "there is no such thing (any more) in this region: check region and ids in cluster.toml",
    Kind.INPUT: "the request was refused as it stands",
}
"""The rest of a sentence: what the user can do about an error of the class."""

ADVICE_BY_CODE: tuple[tuple[str, str], ...] = (
    ("InvalidAccessKeyId", "the access key is unknown or disabled: check it in the console (RAM, AccessKey)"),
    ("SignatureDoesNotMatch", "the access key's secret is wrong"),
    ("IllegalTimestamp", "this machine's clock is wrong by more than 15 minutes: set it"),
    ("InvalidTimeStamp", "this machine's clock is wrong by more than 15 minutes: set it"),
    ("IdempotentParameterMismatch", "an interrupted call was repeated with other settings: run the command again"),
    ("InvalidAccountStatus.SnapshotService", "open the snapshot service once in the cloud's console"),
    ("InvalidAccountStatus.NotEnoughBalance", "the account's balance is too low for pay-as-you-go: top it up"),
    ("QuotaExceed.ElasticQuota", "ask for a higher vCPU quota in the console's Quota Center, or take a smaller type"),
    ("QuotaExceed.Snapshot", "remove old snapshots: fab snapshots.prune"),
    ("IncorrectDiskStatus.Never", "the disk was never used: attach it to a machine first"),
    ("SnapshotCreatedDisk", "disks made from the snapshot exist: remove them first, or force it"),
)


SETTING_OF = {"InvalidDataDiskSize": "data_disk_gib", "InvalidSystemDiskSize": "system_disk_gib"}
"""Which setting is wrong, by the beginning of a code."""


def setting_of(code: str) -> str:
    """The setting that a refusal is about; empty where it is none."""
    return next((key for begins, key in SETTING_OF.items() if code.startswith(begins)), "")


def sentence(action: str, code: str, message: str, kind: Kind, request_id: str = "") -> str:
    """What was asked, what the cloud said, what to do; one line, without what a wrong signature's answer quotes."""
    said = " ".join(message.split())[:300].rstrip(".?! ")
    if code.startswith(("SignatureDoesNotMatch", "IncompleteSignature")):
        said = "the signature does not match"  # the original quotes the whole signed request
    advice = next((text for begins, text in ADVICE_BY_CODE if code.startswith(begins)), ADVICE[kind])
    told = ": ".join(part for part in (action, code, said) if part)
    return f"{told}; {advice}" + (f" (request {request_id})" if request_id else "")


REASONS: tuple[tuple[tuple[str, ...], Kind, str], ...] = (
    (
        ("certificate_verify_failed", "certificate verify failed"),
        Kind.INPUT,
        "the certificate of {host} is not trusted by this machine (a proxy in between, or an old CA bundle?)",
    ),
    (("proxy",), Kind.PASSING, "the proxy that HTTP_PROXY or HTTPS_PROXY names cannot be used"),
    (
        ("failed to resolve", "name or service not known", "getaddrinfo", "temporary failure in name resolution"),
        Kind.PASSING,
        "{host} cannot be found: is there a network, and is the region's name right?",
    ),
    (("timed out", "timeout"), Kind.PASSING, "no answer from {host} within {read_s:.0f} s"),
    (("refused",), Kind.PASSING, "nothing answers at {host}"),
    (("expecting value", "json", "has no attribute"), Kind.PASSING, "{host} gave an answer that is not the API's"),
    (
        ("credential", "unable to load"),
        Kind.AUTH,
        "the credentials cannot be read any more (expired, or their source is gone)",
    ),
)
CUT = "the connection to {host} was cut before the answer came"


def no_answer(action: str, said: str, host: str, read_s: float) -> tuple[Kind, str]:
    """The class of a call without an answer, and the sentence about it; `said` is what the libraries said."""
    low = said.lower()
    known = (row for row in REASONS if any(word in low for word in row[0]))
    _, kind, reason = next(known, ((), Kind.PASSING, CUT))
    asks = reason.endswith("?")  # a name that cannot be found is looked at, not tried again
    advice = "" if kind is Kind.INPUT or asks else f"; {ADVICE[kind]}"
    return kind, f"{action}: {reason.format(host=host, read_s=read_s)}{advice}"
