"""One node at a time."""

import json

import pytest

DATA = "/data"


def test_it_goes_by_its_name(host, node):
    assert host.check_output("hostname") == node.name


def test_every_name_resolves_to_its_private_address(host, node, cluster):
    for other in cluster.nodes:
        addresses = {line.split()[0] for line in host.check_output(f"getent ahostsv4 {other.name}").splitlines()}
        assert addresses == {other.private_address}


def test_etc_hosts_names_each_node_once(host, node, cluster):
    lines = [line.split("#")[0].split() for line in host.file("/etc/hosts").content_string.splitlines()]
    for other in cluster.nodes:
        assert [line[0] for line in lines if other.name in line[1:]] == [other.private_address]


def test_the_data_disk_is_mounted_by_serial_and_survives_a_missing_disk(host, node):
    mount = host.mount_point(DATA)
    assert mount.exists
    assert mount.filesystem in ("ext4", "xfs")
    if node.disk_serial:
        device = host.check_output(f"readlink -f /dev/disk/by-id/*{node.disk_serial}")
        assert host.check_output(f"readlink -f $(findmnt -no SOURCE {DATA})").startswith(device)
        fstab = [line.split() for line in host.file("/etc/fstab").content_string.splitlines()]
        (line,) = [line for line in fstab if len(line) > 3 and line[1] == DATA]
        assert "nofail" in line[3]


def test_passwords_do_not_open_it(host):
    settings = host.check_output("sshd -T").lower()
    assert "passwordauthentication no" in settings
    assert "kbdinteractiveauthentication no" in settings
    assert "permitrootlogin yes" not in settings


def test_only_this_clusters_nodes_have_access_each_from_its_own_address(host, node, cluster):
    lines = host.file("/root/.ssh/authorized_keys").content_string.splitlines()
    ours = {line.rsplit("spotune:", 1)[1]: line for line in lines if " spotune:" in line and "ssh-ed25519" in line}
    assert set(ours) == {n.name for n in cluster.nodes}
    for other in cluster.nodes:
        assert ours[other.name].startswith(f'from="{other.private_address}",')


def test_its_private_key_is_its_own(host, node, cluster, open_host):
    key = host.file("/root/.ssh/id_cluster")
    assert key.mode == 0o600
    fingerprints = {open_host(n.name).check_output("ssh-keygen -lf /root/.ssh/id_cluster.pub") for n in cluster.nodes}
    assert len(fingerprints) == len(cluster.nodes)


def test_it_knows_every_nodes_host_key_once(host, node, cluster, open_host):
    known = host.file("/etc/ssh/ssh_known_hosts").content_string
    for other in cluster.nodes:
        key = open_host(other.name).file("/etc/ssh/ssh_host_ed25519_key.pub").content_string.split()[1]
        (line,) = [line for line in known.splitlines() if other.name in line.split()[0].split(",")]
        assert line.split()[2] == key


def test_nccl_is_told_the_interface_of_the_private_address(host, node):
    links = json.loads(host.check_output("ip -j address"))
    (name,) = [link["ifname"] for link in links for a in link["addr_info"] if a["local"] == node.private_address]
    assert f"NCCL_SOCKET_IFNAME=={name}" in host.file("/etc/nccl.conf").content_string.splitlines()


@pytest.mark.parametrize("package", ["git", "rsync", "pdsh", "ninja-build", "tmux"])
def test_the_base_packages_are_there(host, package):
    assert host.package(package).is_installed


def test_a_compiler_is_there_where_something_is_compiled(host, cluster):
    assert host.package("build-essential").is_installed or cluster.settings.torch_flavour == "cpu"


def test_the_environment_imports_what_training_needs(host):
    words = host.check_output(
        "DS_ACCELERATOR=cpu /data/env/bin/python -c "
        "'import torch, deepspeed, transformers, peft; print(torch.__version__)' 2>/dev/null"
    )
    assert words.splitlines()[-1].startswith("2.13")


def test_the_environment_and_the_models_are_the_heads(host, head):
    for listing in (
        "cat /data/env/spotune-env.json",
        "cd /data/models && for m in */; do echo $m; sha256sum < $m/SHA256SUMS; done",
    ):
        assert host.check_output(listing) == head.check_output(listing)


def test_every_model_file_has_the_sum_it_should(host):
    host.check_output("set -e; cd /data/models; for m in */; do (cd $m && sha256sum -c --quiet SHA256SUMS); done")
