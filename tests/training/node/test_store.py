"""The store where ranks meet: at the head's address and at no other."""

import socket
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = pytest.mark.torch

from tests.support.ports import free_pair  # noqa: E402
from training.node import heartbeat  # noqa: E402
from training.node.heartbeat import open_store  # noqa: E402

LIMIT = timedelta(seconds=10)


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def test_the_store_listens_at_the_heads_address_alone() -> None:
    port = free_pair()
    head = open_store("127.0.0.2", port, True, LIMIT)
    joined = open_store("127.0.0.2", port, False, LIMIT)
    head.set("a", "1")
    assert joined.get("a") == b"1"
    assert answers("127.0.0.2", port) and not answers("127.0.0.1", port)
    del joined, head
    assert not answers("127.0.0.2", port), "its port is free again"


@pytest.mark.parametrize(
    ("backend", "ranks", "card"), [("nccl", 2, "cuda:3"), ("nccl", 1, "cuda:3"), ("gloo", 2, None)]
)
def test_ranks_of_nccl_are_bound_to_their_cards(monkeypatch, backend, ranks, card) -> None:
    given = {}
    ours = {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat, "open_store", lambda *_: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **settings: given.update(settings))
    heartbeat.join(backend, LIMIT)
    assert str(given["device_id"]) == str(card)
