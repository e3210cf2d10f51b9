"""Key pairs: whose ssh may enter."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

from inventory.localcloud.ecs.account import EmulatedKeyPair
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action
from inventory.localcloud.ecs.listing import checked_tags, describes, tag_list
from inventory.localcloud.ecs.times import minute

_NAME = re.compile(r"[A-Za-z\u4e00-\u9fff][\w.:\u4e00-\u9fff-]{1,127}")


@action("ImportKeyPair")
def import_key_pair(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """The name is taken once and for all: another key under it, or the same again, is refused."""
    name, body = p.needed("KeyPairName"), p.needed("PublicKeyBody").strip()
    if not _NAME.fullmatch(name) or name.startswith(("http://", "https://")):
        raise ApiError(400, "InvalidKeyPairName.Malformed", "Specified Key Pair name is not valid.")
    fingerprint = fingerprint_of(body)
    if name in cloud.account.key_pairs:
        raise ApiError(400, "KeyPair.AlreadyExist", "The key pair already exist.")
    tags = checked_tags(p)
    made = EmulatedKeyPair(name=name, public_key=body, fingerprint=fingerprint, created=cloud.now(), tags=tags)
    cloud.account.key_pairs[name] = made
    return {"KeyPairName": name, "KeyPairFingerPrint": fingerprint}


def _shown(cloud: EmulatedCloud, each: EmulatedKeyPair) -> dict[str, Any]:
    return {
        "KeyPairName": each.name,
        "KeyPairFingerPrint": each.fingerprint,
        "CreationTime": minute(each.created),
        "Tags": tag_list(each.tags),
    }


describe_key_pairs = describes("KeyPairs", "KeyPair", _shown, equal={"KeyPairName": "name"}, has_token=False)


@action("DeleteKeyPairs")
def delete_key_pairs(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Machines that have the key keep it. Names that are not there are no error."""
    p.needed("KeyPairNames")
    for name in p.json_strings("KeyPairNames") or []:
        cloud.account.key_pairs.pop(name, None)
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
