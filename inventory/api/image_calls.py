"""Images made of our own system disks. Thin: one action of the API a method."""

from __future__ import annotations

from collections.abc import Sequence

from inventory.api import offer_answers as answers
from inventory.api import requests
from inventory.api.caller import Caller
from inventory.api.errors import CloudError, Kind
from inventory.api.values import OwnImage, Tags

ANY_STATUS = "Creating,Waiting,Available,UnAvailable,CreateFailed"
"""Without it the cloud lists those alone that can be used."""


class ImageCalls(Caller):
    """Own images of one region."""

    def own_images(self, *, tags: Tags | None = None, ids: Sequence[str] = ()) -> tuple[OwnImage, ...]:
        """The account's images with all these tags, one of these ids."""
        fields = {"RegionId": self.region_id, "ImageOwnerAlias": "self", "Status": ANY_STATUS}
        fields |= {"ImageId": ",".join(ids)} if ids else {}
        pages = self.numbered_pages("DescribeImages", {**fields, "Tag": requests.tags(tags)} if tags else fields)
        return tuple(image for page in pages for image in answers.own_images(page))

    def create_image(self, snapshot_id: str, name: str, tags: Tags, token: str) -> str:
        """A new image's id, made of the snapshot of a system disk: of nothing else of its machine."""
        fields = {
            "RegionId": self.region_id,
            "SnapshotId": snapshot_id,
            "ImageName": name,
            "Tag": requests.tags(tags),
            "ClientToken": token,
        }
        return str(self.call("CreateImage", fields)["ImageId"])

    def delete_image(self, image_id: str) -> None:
        """Delete an image, its snapshot stays; machines made from it go on. One that is gone already is no error."""
        try:
            self.call("DeleteImage", {"RegionId": self.region_id, "ImageId": image_id, "Force": True})
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise
