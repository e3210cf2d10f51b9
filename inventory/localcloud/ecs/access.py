"""Actions about key pairs: whose ssh may enter."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action
from inventory.localcloud.ecs.listing import checked_tags, has_tags, is_named, page, tag_list
from inventory.localcloud.ecs.stamps import minute
from inventory.localcloud.ecs.world import KeyPair

_NAME = re.compile(r"[A-Za-z\u4e00-\u9fff][\w.:\u4e00-\u9fff-]{1,127}")


@action("ImportKeyPair")
def import_key_pair(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The name is taken once and for all: another key under it, or the same again, is refused."""
    name, body = p.needed("KeyPairName"), p.needed("PublicKeyBody").strip()
    if not _NAME.fullmatch(name) or name.startswith(("http://", "https://")):
        raise ApiError(400, "InvalidKeyPairName.Malformed", "Specified Key Pair name is not valid.")
    fingerprint = fingerprint_of(body)
    if name in cloud.world.key_pairs:
        raise ApiError(400, "KeyPair.AlreadyExist", "The key pair already exist.")
    tags = checked_tags(p)
    made = KeyPair(name=name, public_key=body, fingerprint=fingerprint, created=cloud.now(), tags=tags)
    cloud.world.key_pairs[name] = made
    return {"KeyPairName": name, "KeyPairFingerPrint": fingerprint}


@action("DescribeKeyPairs")
def describe_key_pairs(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    found = [
        each
        for each in cloud.world.key_pairs.values()
        if is_named(each.name, p.text("KeyPairName"))
        and p.text("KeyPairFingerPrint") in ("", each.fingerprint)
        and has_tags(each.tags, p.tags())
    ]
    shown, told = page(p, found)
    del told["NextToken"]
    pairs = [_pair(each, p.flag("IncludePublicKey")) for each in shown]
    return {"KeyPairs": {"KeyPair": pairs}, **told}


def _pair(of: KeyPair, with_key: bool) -> dict[str, Any]:
    return {
        "KeyPairName": of.name,
        "KeyPairFingerPrint": of.fingerprint,
        "CreationTime": minute(of.created),
        "ResourceGroupId": "",
        "Tags": tag_list(of.tags),
        **({"PublicKey": of.public_key} if with_key else {}),
    }


@action("DeleteKeyPairs")
def delete_key_pairs(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Machines that have the key keep it. Names that are not there are no error."""
    p.needed("KeyPairNames")
    for name in p.json_strings("KeyPairNames") or []:
        cloud.world.key_pairs.pop(name, None)
    return {}


def fingerprint_of(public_key: str) -> str:
    """MD5 of an OpenSSH key's blob, as hexadecimal digits without colons. Raises InvalidPublicKeyBody.Malformed."""
    fields = public_key.split()
    try:
        blob = base64.b64decode(fields[1], validate=True)
        length = int.from_bytes(blob[:4], "big")
        if blob[4 : 4 + length].decode() != fields[0] or not length:
            raise ValueError("another kind of key")
    except (IndexError, ValueError, binascii.Error):
        told = "The PublicKeyBody format is not supported."
        raise ApiError(400, "InvalidPublicKeyBody.Malformed", told) from None
    return hashlib.md5(blob, usedforsecurity=False).hexdigest()
