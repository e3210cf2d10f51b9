"""What the data disk's plan writes, where no disk is needed to see it."""

import pytest

from deploy.disk_plan import BlockDevice, fstab_with

DISK = BlockDevice("/dev/disk/by-id/virtio-bp1test", "/dev/vdb", "254:16", 1)


@pytest.mark.parametrize("target", ["/data", "/data/", "//data"])
def test_a_line_of_fstab_for_data_is_replaced_however_it_is_spelt(target):
    fstab = fstab_with(f"LABEL=root / ext4\n/dev/vdb1 {target} ext4\n/dev/vdc {target}/more ext4\n", DISK, "ext4")
    assert [line.split()[1] for line in fstab.splitlines()] == ["/", "/data", f"{target}/more"]
