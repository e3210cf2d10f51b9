"""The codes of the API's errors, and calls without an answer of it: of which class each is, and what a user is told
about it, in our words: those of HTTP libraries quote URLs. Pure."""

from __future__ import annotations

import re

from inventory.cloud.errors import LATER, Kind

DRY_SUCCESS = ("DryRunOperation", "DRYRUN.SUCCESS")
"""A dry run that would succeed is answered with one of these errors."""

FAMILIES: tuple[tuple[Kind, str], ...] = (
    (Kind.THROTTLED, r"Throttl|FlowControl"),
    # What never passes, though it has the words of what does.
    (
        Kind.INPUT,
        r"IdempotentParameterMismatch|DiskStatus\.(Never|Invalid)|IncorrectDiskType|^InvalidStatus\.(Value|NotFound)"
        r"|InstanceType\.(ElasticNetworkInterface|Missing)|^Missing|^Invalid(Action|Version)\.Not",
    ),
    (
        Kind.DISK_KIND,
        r"DiskCategory(?!LimitExceed)|^(Invalid)?Category|DiskSizeOrCategory|PerformanceLevel|CloudSSD"
        r"|OperationDenied\.(DiskType|ZoneSystemCategory)",
    ),
    (Kind.PRICE, r"SpotPrice|InvalidSpot(AliUid|Authorized|InstanceUID)"),
    (
        Kind.NO_STOCK,
        r"NoStock|OutOfStock|SoldOut|ResourceControl|ResourceNotAvailable|ResourceType\.NotSupport|^Zone\."
        r"|Zone\w*\.?Not(OnSale|Open|Allowed|Support|Found)|InvalidInstanceType\.|^InstanceType(\.Offline|NotSupport)"
        r"|ImageNotSupportInstanceType|NotSupported\.InstanceType|Quota\w*\.PrivateIp|NoVlan|PriceNotFound"
        r"|^Unavailable\.Regions",
    ),
    (Kind.QUOTA, r"Quota"),
    (
        Kind.MONEY,
        r"AccountStatus|Balance|Arrear|RealName|PaymentMethod|PayMethod|UnPaid|Instance\.?Expired|SecurityRisk"
        r"|RiskControl|LockedForSecurity|DeletionProtection|ImageNotSubscribed",
    ),
    (
        Kind.AUTH,
        r"AccessKey|SecurityToken|Signature|Timestamp|InvalidCredentials|NoPermission|WhiteList|Unauthori[sz]ed"
        r"|Forb\w\wden(?!\.\w*NotFound)",  # the API itself spells it in three ways
    ),
    (
        Kind.PASSING,
        r"ServiceUnavailable|ServiceTimeout|InnerService|InternalError|InternalFailure|UnknownError|Processing"
        r"|Operation\.?Conflict|TaskConflict|CreatingConflict|SystemBusy|Dist\w*Lock|^OperationFailed"
        r"|NodeControllerUnavailable|CreateSnapshot\.Failed",
    ),
    (
        Kind.WAIT,
        r"Incorrect\w*Status\b|^InvalidStatus\.|NotReady|Initializ|CoolingPeriod|taching\w*Exceed|AlreadyAttached"
        r"|StillAttached|DiskError|Creating(Snapshot)?$|ClientNotRunning|StatusNotSupported",
    ),
    (Kind.NOT_FOUND, r"Not(Found|Exists?)$"),
)
"""The classes by the words of a code, wherever in it they are; the first that fits counts."""
MESSAGES: tuple[tuple[Kind, str], ...] = (
    (
        Kind.NO_STOCK,
        r"out of (usage|stock)|sold out|sales? of|specified zone (is|does) not|to the specified zone|this resource type"
        r"|not support the specified instance ?type",
    ),
    (Kind.QUOTA, r"quota"),
)
"""The same by the vendor's sentence, for codes that say nothing, as OperationDenied."""
OURS = re.compile(
    r"^(?!.*(?<!Value)NotSupport(ed)?$)(Invalid|Incomplete|Abs\.|HOSTNAME|ILLEGAL)|^(Unsupported|Duplicate|Dependency)"
    r"|Malformed|Mismatch|Unmatched|Exceed|Exist|Conflict|Violation|SnapshotCreated|NotInSameZone|VPCDisabled"
    r"|ImageRemoved|ImageNotSupport|OperationDenied\.(Image|Inconsistent|InvalidNetwork|LocalDisk|Snapshot)"
)
"""Codes that say what is wrong with a request wherever it goes."""


def classify(code: str | None, http_status: int | None, message: str = "") -> Kind:
    """The class of an error by the words of its code; without a code by the HTTP status; without both (time-outs, cut
    connections, answers that are not the API's) it is passing.
    """
    if not code or code == "None":
        return _by_status(http_status)
    for kind, words in FAMILIES:
        if re.search(words, code, re.IGNORECASE):
            return kind
    if http_status is not None and (http_status == 429 or (http_status >= 500 and not code.startswith("Invalid"))):
        return _by_status(http_status)
    for kind, words in MESSAGES:
        if re.search(words, message, re.IGNORECASE):
            return kind
    return Kind.INPUT if OURS.search(code) else Kind.UNKNOWN


def _by_status(http_status: int | None) -> Kind:
    if http_status == 429:
        return Kind.THROTTLED
    return Kind.PASSING if http_status is None or http_status >= 500 else Kind.INPUT


ADVICE = {
    Kind.THROTTLED: "the account made too many calls: try again in a minute",
    Kind.PASSING: "this usually passes: run the same command again, nothing is made twice",
    Kind.WAIT: LATER,
    Kind.NO_STOCK: "not to be had there: add other types or zones under [aliyun] in cluster.toml, or try later",
    Kind.PRICE: 'change spot, price_limit or spot_duration_h under [aliyun] in cluster.toml (spot = "as-price-goes" '
    "never pays more than the list price)",
    Kind.DISK_KIND: "the machine type or zone takes other disks: change disk_category or performance_level under "
    "[aliyun] in cluster.toml",
    Kind.QUOTA: "ask for more in the console's Quota Center, or take other types, zones or fewer machines",
    Kind.MONEY: "see to it in the cloud's console (balance, real-name authentication, services to be opened), "
    "then run the same command again",
    Kind.AUTH: "check the access key and its permissions (AliyunECSFullAccess, AliyunVPCFullAccess)",
    Kind.NOT_FOUND: "there is no such thing (any more) in this region: check region and ids in cluster.toml",
    Kind.INPUT: "the request was refused as it stands",
    Kind.UNKNOWN: "spotune does not recognise this error code; look it up in the vendor's error center",
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
    ("InvalidOperation.DeletionProtection", "it is protected: switch deletion protection off in the cloud's console"),
    ("InstanceLockedForSecurity", "the machine is locked: see to it in the cloud's console (Security Center)"),
    ("SnapshotCreatedDisk", "disks made from the snapshot exist: remove them first, or force it"),
)


SETTING_OF = {"InvalidDataDiskSize": "data_disk_gib", "InvalidSystemDiskSize": "system_disk_gib"}
"""Which setting is wrong, by the beginning of a code."""


def setting_of(code: str) -> str:
    """The setting that a refusal is about; empty where it is none."""
    return next((key for begins, key in SETTING_OF.items() if code.startswith(begins)), "")


def sentence(action: str, code: str, message: str, kind: Kind, request_id: str = "") -> str:
    """What was asked, what the cloud said, what to do; one line, without what a wrong signature's answer quotes."""
    reason = " ".join(message.split())[:300].rstrip(".?! ")
    if code.startswith(("SignatureDoesNotMatch", "IncompleteSignature")):
        reason = "the signature does not match"  # the original quotes the whole signed request
    advice = next((text for begins, text in ADVICE_BY_CODE if code.startswith(begins)), ADVICE[kind])
    summary = ": ".join(part for part in (action, code, reason) if part)
    return f"{summary}; {advice}" + (f" (request {request_id})" if request_id else "")


REASONS: tuple[tuple[tuple[str, ...], Kind, str], ...] = (
    (
        ("certificate_verify_failed", "certificate verify failed"),
        Kind.INPUT,
        "the certificate of {host} is not trusted by this machine: where a company's proxy signs it, set "
        "REQUESTS_CA_BUNDLE or SSL_CERT_FILE to the file with its CA",
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


def no_answer(action: str, error_text: str, host: str, read_s: float) -> tuple[Kind, str]:
    """The class of a call without an answer, and the sentence about it; `error_text` is what the libraries said."""
    low = error_text.lower()
    known = (row for row in REASONS if any(word in low for word in row[0]))
    _, kind, reason = next(known, ((), Kind.PASSING, CUT))
    asks = reason.endswith("?")  # a name that cannot be found is looked at, not tried again
    advice = "" if kind is Kind.INPUT or asks else f"; {ADVICE[kind]}"
    return kind, f"{action}: {reason.format(host=host, read_s=read_s)}{advice}"
