"""Calls to the local cloud's ECS API by plain HTTP, signed as the vendor's client does."""

import hashlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from datetime import UTC, datetime

from inventory.localcloud.ecs.api import V3, Request, v3_signature

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFn0Hq0cqjZ9lSLeyq1SZu0xWw5xQq5pC1mUuFm0iWzK somebody@somewhere"


def signed_headers(*, host, action, version, query, key, now, nonce):
    """The headers of a POST without a body to `/`, signed with (access key id, secret)."""
    digest = hashlib.sha256(b"").hexdigest()
    headers = {
        "host": host,
        "x-acs-action": action,
        "x-acs-version": version,
        "x-acs-date": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "x-acs-signature-nonce": nonce,
        "x-acs-content-sha256": digest,
    }
    signature = v3_signature(Request("POST", headers, query), headers, digest, key[1])
    names = ";".join(sorted(headers))
    return headers | {"Authorization": f"{V3} Credential={key[0]},SignedHeaders={names},Signature={signature}"}


def http(api, method, query, headers=None, body=None):
    """(status, headers, body) of a plain request."""
    url = f"http://{api.endpoint}/?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}"
    request = urllib.request.Request(url, method=method, headers=headers or {}, data=body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, refused.read().decode()


def v3(api, action, query=None, *, secret=None, at=None, nonce=None, version="2014-05-26", **asked):
    """(status, answer) of a call signed by V3."""
    key = (api.access_key_id, secret or api.access_key_secret)
    nonce = nonce or uuid.uuid4().hex
    usual = {} if version == "local" else {"RegionId": "cn-hangzhou"}  # as the vendor's clients do
    query = {name: str(value) for name, value in {**usual, **(query or {}), **asked}.items()}
    headers = signed_headers(
        host=api.endpoint, action=action, version=version, query=query, key=key, now=at or time.time(), nonce=nonce
    )
    status, _, text = http(api, "POST", query, headers)
    return status, json.loads(text)
