"""Signatures of the ECS API against the vendor's published examples."""

from dataclasses import replace
from datetime import datetime

import pytest

from inventory.localcloud.ecs.actions import ApiError
from inventory.localcloud.ecs.api import Request, verified
from tests.support.signed_calls import signed_headers

AT = datetime.fromisoformat("2023-10-26T10:22:32Z").timestamp()
SECRETS = {"YourAccessKeyId": "YourAccessKeySecret"}
PUBLISHED_V3 = Request(
    method="POST",
    query={"ImageId": "win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd", "RegionId": "cn-shanghai"},
    headers={
        "host": "ecs.cn-shanghai.aliyuncs.com",
        "x-acs-action": "RunInstances",
        "x-acs-version": "2014-05-26",
        "x-acs-date": "2023-10-26T10:22:32Z",
        "x-acs-signature-nonce": "3156853299f313e23d1673dc12e1703d",
        "x-acs-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "authorization": "ACS3-HMAC-SHA256 Credential=YourAccessKeyId,SignedHeaders=host;x-acs-action;"
        "x-acs-content-sha256;x-acs-date;x-acs-signature-nonce;x-acs-version,"
        "Signature=06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0",
    },
)
"""https://www.alibabacloud.com/help/en/sdk/product-overview/v3-request-structure-and-signature"""


def code_of(request, secrets=SECRETS, now=AT):
    with pytest.raises(ApiError) as refused:
        verified(request, secrets, now)
    return refused.value.status, refused.value.code


def with_headers(**changed):
    return replace(PUBLISHED_V3, headers=PUBLISHED_V3.headers | {k.replace("_", "-"): v for k, v in changed.items()})


def test_the_published_v3_request_is_the_callers_it_says():
    caller = verified(PUBLISHED_V3, SECRETS, AT)
    assert (caller.action, caller.version, caller.access_key_id) == ("RunInstances", "2014-05-26", "YourAccessKeyId")
    assert caller.nonce == "3156853299f313e23d1673dc12e1703d"


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PUBLISHED_V3, method="GET"),
        replace(PUBLISHED_V3, query={**PUBLISHED_V3.query, "Amount": "100"}),
        replace(PUBLISHED_V3, body=b"Amount=100"),
        with_headers(x_acs_action="DeleteInstances"),
        with_headers(x_acs_date="2023-10-26T10:22:33Z"),
        with_headers(host="ecs.cn-hangzhou.aliyuncs.com"),
        with_headers(authorization=PUBLISHED_V3.headers["authorization"][:-1] + "1"),
    ],
    ids=["method", "parameter", "body", "action", "date", "host", "signature"],
)
def test_a_v3_request_changed_after_it_was_signed_is_refused(wrong):
    assert code_of(wrong) == (400, "SignatureDoesNotMatch")


def test_a_body_is_what_its_signed_digest_says():
    told = with_headers(x_acs_content_sha256="0" * 64)
    assert code_of(told) == (400, "SignatureDoesNotMatch")


def test_a_v3_request_must_sign_what_it_asks_for():
    short = PUBLISHED_V3.headers["authorization"].replace("x-acs-action;", "")
    assert code_of(with_headers(authorization=short)) == (400, "IncompleteSignature")
    assert code_of(with_headers(authorization="ACS3-HMAC-SHA256 nonsense")) == (400, "IncompleteSignature")
    assert code_of(Request("GET", {}, {"Action": "DescribeInstanceTypes"})) == (400, "IncompleteSignature")


@pytest.mark.parametrize("off", [-901, 901])
def test_a_request_is_valid_for_a_quarter_of_an_hour(off):
    assert verified(PUBLISHED_V3, SECRETS, AT + off * 0.99)
    assert code_of(PUBLISHED_V3, now=AT + off) == (400, "InvalidTimeStamp.Expired")


def test_an_unknown_key_is_not_found():
    assert code_of(PUBLISHED_V3, secrets={}) == (404, "InvalidAccessKeyId.NotFound")


def test_what_we_sign_ourselves_is_accepted():
    headers = signed_headers(
        host="127.0.0.1:1",
        action="Hurry",
        version="local",
        query={"Seconds": "60 ~*é"},
        key=("YourAccessKeyId", "YourAccessKeySecret"),
        now=AT,
        nonce="n",
    )
    small = {name.lower(): value for name, value in headers.items()}
    assert verified(Request("POST", small, {"Seconds": "60 ~*é"}), SECRETS, AT).action == "Hurry"
