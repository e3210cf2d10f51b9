"""Key pairs. One action of the API a method, beside what it hears."""

from __future__ import annotations

import json

from inventory.aliyun_ecs.answer_fields import Answer, listed, needed
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import tag_list
from inventory.cloud.errors import CloudError
from inventory.cloud.values import KeyPair, Tags

TAKEN = ("KeyPair.AlreadyExist", "InvalidKeyPairName.Duplicate")


class KeyPairs(Caller):
    """The ssh keys that machines of one region can be given."""

    def key_pairs(self, name: str = "", *, tags: Tags | None = None) -> tuple[KeyPair, ...]:
        wanted = {"KeyPairName": name, "Tag": tag_list(tags)}
        fields = {"RegionId": self.region_id, **{key: value for key, value in wanted.items() if value}}
        pages = self.numbered_pages("DescribeKeyPairs", fields)
        return tuple(each for page in pages for each in key_pairs_in(page) if name in ("", each.name))

    def import_key_pair(self, name: str, public_key: str, tags: Tags | None) -> KeyPair:
        fields = {"RegionId": self.region_id, "KeyPairName": name, "PublicKeyBody": public_key}
        try:
            return key_pair_in(self.call("ImportKeyPair", {**fields, "Tag": tag_list(tags)}))
        except CloudError as error:
            # The action has no ClientToken: this is also what a repetition after a lost answer says.
            known = self.key_pairs(name) if error.code.startswith(TAKEN) else ()
            if not known:
                raise
            return known[0]

    def delete_key_pair(self, name: str) -> None:
        self.remove("DeleteKeyPairs", {"RegionId": self.region_id, "KeyPairNames": json.dumps([name])})


def key_pairs_in(answer: Answer) -> tuple[KeyPair, ...]:
    """DescribeKeyPairs"""
    return tuple(key_pair_in(each) for each in listed(answer, "KeyPairs", "KeyPair"))


def key_pair_in(each: Answer) -> KeyPair:
    """ImportKeyPair"""
    return KeyPair(needed(each, "KeyPairName"), each.get("KeyPairFingerPrint") or "")
