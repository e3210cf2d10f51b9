"""Images, the vendor's and our own. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

from collections.abc import Sequence

from inventory.aliyun_ecs.answer_fields import Answer, listed, moment, needed, tags, whole
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import tag_list
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Image, OwnImage, Tags

ANY_STATUS = "Creating,Waiting,Available,UnAvailable,CreateFailed"
"""Without it the cloud lists those alone that can be used."""


class Images(Caller):
    """Images of one region."""

    def image(self, name: str) -> Image:
        for key in ("ImageFamily",) if ":" in name else ("ImageId", "ImageFamily"):
            asked = {"RegionId": self.region_id, key: name}
            pages = self.numbered_pages("DescribeImages", asked)
            found = [each for page in pages for each in images_in(page)]
            if found:
                return max(found, key=lambda each: each[0])[1]
        raise CloudError(
            f"there is no image {name!r} in {self.region_id}: name an id or a family, as acs:ubuntu_22_04_x64",
            Kind.NOT_FOUND,
        )

    def own_images(self, *, tags: Tags | None = None, ids: Sequence[str] = ()) -> tuple[OwnImage, ...]:
        fields = {"RegionId": self.region_id, "ImageOwnerAlias": "self", "Status": ANY_STATUS}
        fields |= {"ImageId": ",".join(ids)} if ids else {}
        pages = self.numbered_pages("DescribeImages", {**fields, "Tag": tag_list(tags)} if tags else fields)
        return tuple(image for page in pages for image in own_images_in(page))

    def create_image(self, snapshot_id: str, name: str, tags: Tags, token: str) -> str:
        fields = {
            "RegionId": self.region_id,
            "SnapshotId": snapshot_id,
            "ImageName": name,
            "Tag": tag_list(tags),
            "ClientToken": token,
        }
        return str(self.call("CreateImage", fields)["ImageId"])

    def delete_image(self, image_id: str) -> None:
        self.remove("DeleteImage", {"RegionId": self.region_id, "ImageId": image_id, "Force": True})


def images_in(answer: Answer) -> tuple[tuple[str, Image], ...]:
    """DescribeImages: when each was made, and the image."""
    return tuple((each.get("CreationTime", ""), _image(each)) for each in listed(answer, "Images", "Image"))


def own_images_in(answer: Answer) -> tuple[OwnImage, ...]:
    """DescribeImages of images of one's own."""
    return tuple(
        OwnImage(
            image_id=needed(each, "ImageId"),
            name=each.get("ImageName", ""),
            snapshot_id=_system_snapshot(each),
            size_gib=whole(each.get("Size")),
            status=each.get("Status", "Available"),
            progress=each.get("Progress", ""),
            created=moment(needed(each, "CreationTime")),
            tags=tags(each),
        )
        for each in listed(answer, "Images", "Image")
    )


def _system_snapshot(image: Answer) -> str:
    mappings = listed(image, "DiskDeviceMappings", "DiskDeviceMapping")
    return next((each.get("SnapshotId", "") for each in mappings if each.get("Type", "system") == "system"), "")


def _image(each: Answer) -> Image:
    return Image(
        image_id=needed(each, "ImageId"),
        name=each.get("ImageName", ""),
        family=each.get("ImageFamily") or "",
        size_gib=whole(each.get("Size")),
        os_name=each.get("OSNameEn") or each.get("OSName") or "",
        status=each.get("Status", "Available"),
    )
