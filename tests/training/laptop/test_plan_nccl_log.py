"""NCCL's logs read into facts. The lines are written in the forms of published logs, named at each."""

from __future__ import annotations

import pytest

from training.laptop.attach import fact_lines, read_log, transport_kind

# Two nodes over plain TCP, as NCCL 2.19 writes it (NVIDIA/nccl #1267, #952), through DeepSpeed's launcher.
TCP = """\
te1: [0] te1:4021:4021 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth1
te1: [0] te1:4021:4021 [0] NCCL INFO Bootstrap : Using eth1:10.0.0.11<0>
te1: [0] te1:4021:4021 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
te1: [0] NCCL version 2.19.3+cuda12.3
te1: [0] te1:4021:4060 [0] NCCL INFO NET/IB : No device found.
te1: [0] te1:4021:4060 [0] NCCL INFO NET/Socket : Using [0]eth1:10.0.0.11<0> [1]docker0:172.17.0.1<0>
te1: [0] te1:4021:4060 [0] NCCL INFO Using network Socket
te1: [0] te1:4021:4060 [0] NCCL INFO comm 0x55f90c rank 0 nranks 2 cudaDev 0 busId 30 commId 0x795b - Init START
te1: [0] te1:4021:4060 [0] NCCL INFO Channel 00/02 :    0   1
te1: [0] te1:4021:4060 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
te1: [0] te1:4021:4060 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
te2: [1] te2:377:377 [0] NCCL INFO Bootstrap : Using eth1:10.0.0.12<0>
te2: [1] epoch 1 loss 2.4, nothing of NCCL INFO's
te2: [1]
te2: [1] te2:377:400 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer te1<56938>
te2: [1] te2:377:400 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer te1<56938>
"""


def test_a_tcp_log_tells_version_interface_transport_warnings_and_world_size():
    facts = read_log(TCP.splitlines())
    assert (facts.version, facts.world_size, facts.network) == ("2.19.3", 2, {"Socket"})
    assert facts.bootstrap == {"eth1"}
    assert facts.devices == {"eth1", "docker0"}
    assert facts.transports == {"NET/Socket": 2}
    assert facts.settings == {"NCCL_SOCKET_IFNAME": "eth1"}
    assert facts.warnings == ["socketProgress: Connection closed by remote peer te1<56938>"], "once, not twice"
    lines = fact_lines(facts)
    assert lines[0] == "NCCL 2.19.3, 2 ranks"
    assert "connections: 2 NET/Socket" in lines
    assert lines[-1].startswith("docker0 is a virtual bridge's interface")


# InfiniBand and RoCE: NVIDIA/nccl #1052, #1291 (a plugin), #1538 and #707; the first form is that of NCCL 2.4
# (Mellanox/nv_peer_memory #56).
RDMA = """\
gh1:18:29 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
gh1:18:29 [0] NCCL INFO NET/IB : Using [0]mlx5_4:1/RoCE [RO] [1]mlx5_5:1/RoCE [RO]; OOB bond0:10.10.10.1<0>
gh1:18:29 [0] NCCL INFO P2P plugin IBext_v8
gh1:18:29 [0] NCCL INFO Using network IBext_v8
gh1:18:29 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
gh1:18:29 [0] NCCL INFO Channel 03/0 : 7[7] -> 0[0] via P2P/CUMEM
gh1:18:29 [0] NCCL INFO Channel 04/0 : 7[7] -> 0[0] via P2P/IPC/read
gh1:18:29 [0] NCCL INFO Channel 05/0 : 1[1] -> 0[0] via SHM/direct/direct
gh1:18:29 [0] NCCL INFO ncclCommInitRank comm 0x8ec0 rank 6 nranks 16 cudaDev 6 busId c8000 - Init COMPLETE
"""


def test_an_rdma_log_tells_devices_plugin_and_every_transport():
    facts = read_log(RDMA.splitlines())
    assert facts.devices == {"mlx5_0", "mlx5_4", "mlx5_5"}
    assert (facts.plugin, facts.network, facts.world_size) == ("IBext_v8", {"IBext_v8"}, 16)
    assert facts.transports == {"NET/IB/GDRDMA": 1, "P2P": 2, "SHM": 1}
    assert "network IBext_v8 over mlx5_0, mlx5_4, mlx5_5, plugin IBext_v8" in fact_lines(facts)


def test_another_vendors_plugin_is_named():
    """NET/OFI: NVIDIA/nccl #527; a network's name may have two words."""
    lines = [
        "a:1:2 [4] NCCL INFO NET/OFI Using aws-ofi-nccl 1.4.0aws",
        "a:1:2 [4] NCCL INFO Using network AWS Libfabric",
    ]
    facts = read_log(lines)
    assert (facts.plugin, facts.network) == ("aws-ofi-nccl 1.4.0aws", {"AWS Libfabric"})


@pytest.mark.parametrize(
    ("via", "kind"),
    [("NET/Socket/3", "NET/Socket"), ("NET/IB/0", "NET/IB"), ("P2P/direct", "P2P"), ("SHM", "SHM"), ("NET", "NET")],
)
def test_transports_are_named_without_their_numbers(via: str, kind: str):
    assert transport_kind(via) == kind


def test_data_over_the_loopback_between_ranks_are_suspect():
    """NVIDIA/nccl #1053: every rank met over lo."""
    log = [
        "a:1:2 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>",
        "a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 - Init START",
        "a:1:2 [0] NCCL INFO Channel 00 : 0[18000] -> 1[18000] [send] via NET/Socket/0",
    ]
    assert "set NCCL_SOCKET_IFNAME" in fact_lines(read_log(log))[-1]
    assert "set NCCL_SOCKET_IFNAME" not in "".join(fact_lines(read_log(log[:2])))


def test_a_log_without_nccl_says_how_to_make_it_speak():
    assert fact_lines(read_log(["loss 2.4", "", "\x00\xff garbage"]))[0].endswith(
        "NCCL_DEBUG=INFO in the ranks' environment"
    )
