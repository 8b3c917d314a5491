"""The store of a group: what torch asks of one, and what a stranger gets of it: nothing."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from elastic.errors import GroupError
from elastic.worker.group import store_server, store_wire
from elastic.worker.group.group_store import GroupStore, StoreAddress
from elastic.worker.group.store_server import StoreServer
from tests.patience import DEADLINE_S, wait_for

KEY = "the secret of generation 7"


STORES: list[GroupStore] = []
"""Those of the test that runs: what torch knew of stays in memory, with its connection."""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1")
    server.admit(7, KEY)
    yield server
    while STORES:
        STORES.pop().close()
    server.close()


def connected(
    server: StoreServer, *, generation: int = 7, key: str = KEY, is_patient: bool = True
) -> GroupStore:
    where = StoreAddress(server.address, generation, key)
    store = GroupStore.connect(where, lambda: DEADLINE_S, lambda: not is_patient)
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    STORES.append(store)
    return store


def probe_endpoint(server: StoreServer) -> tuple[socket.socket, bytes]:
    host, _, port = server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), DEADLINE_S)
    return sock, sock.recv(store_wire.GREETING_BYTES, socket.MSG_WAITALL)


def test_it_does_what_torchs_own_store_does(server: StoreServer) -> None:
    """Also below a PrefixStore: torch's C++ calls what Python wrote."""
    for make in (lambda: connected(server), lambda: PrefixStore("p", connected(server))):
        ours, theirs = make(), dist.HashStore()
        for store in (ours, theirs):
            store.set_timeout(timedelta(seconds=0.05))
        for do in (
            lambda s: s.add("n", 3), lambda s: s.add("n", -5), lambda s: bytes(s.get("n")),
            lambda s: s.set("k", "v"), lambda s: bytes(s.get("k")), lambda s: s.check(["k", "n"]),
            lambda s: s.check(["k", "none"]), lambda s: bytes(s.compare_set("c", "", "1")),
            lambda s: bytes(s.compare_set("c", "x", "2")), lambda s: bytes(s.get("c")),
            lambda s: bytes(s.compare_set("c", "1", "3")), lambda s: bytes(s.get("c")),
            lambda s: s.append("a", "one"), lambda s: s.append("a", "two"),
            lambda s: bytes(s.get("a")), lambda s: s.multi_set(["x", "y"], ["1", "2"]),
            lambda s: [bytes(one) for one in s.multi_get(["x", "y"])],
            lambda s: s.delete_key("k"), lambda s: s.delete_key("k"), lambda s: s.check(["k"]),
            lambda s: s.wait(["x", "y"]),
        ):  # fmt: skip
            assert do(ours) == do(theirs)
        for store in (ours, theirs):
            with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
                store.get("nothing")
            with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
                store.wait(["x", "nothing"], timedelta(seconds=0.01))


def test_who_waits_hears_of_keys_that_others_set_and_a_cut_ends_every_wait(
    server: StoreServer,
) -> None:
    with ThreadPoolExecutor(3) as threads:
        waiting, setting = connected(server), connected(server)
        clone = waiting.clone()
        got = threads.submit(waiting.multi_get, ["a", "b"])
        setting.set("a", b"\x00binary\xff")
        setting.set("b", "x" * 3_000_000)
        assert [len(one) for one in got.result(DEADLINE_S)] == [8, 3_000_000]
        blocked = [threads.submit(one.get, "never") for one in (waiting, clone)]
        waiting.cut()
        for one in blocked:
            with pytest.raises(dist.DistNetworkError, match="generation 7"):
                one.result(DEADLINE_S)
    assert setting.num_keys() == 2


def test_a_member_of_a_generation_that_is_not_led_yet_waits_for_it(server: StoreServer) -> None:
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(connected, server, generation=8, key="the next one")
        old = connected(server)
        old.set("k", "of 7")
        server.admit(8, "the next one")
        new = early.result(DEADLINE_S)
    assert not new.check(["k"])
    # Who has not left yet may still read what was agreed on there.
    assert old.get("k") == b"of 7"
    with pytest.raises(GroupError, match="no answer at"):
        connected(server, generation=6, is_patient=False)


def test_who_has_another_secret_or_is_no_server_of_ours_is_found_out(server: StoreServer) -> None:
    with pytest.raises(GroupError, match="no answer at"):
        connected(server, key="a guess", is_patient=False)
    with socket.create_server(("127.0.0.1", 0)) as false, ThreadPoolExecutor(1) as threads:
        port = false.getsockname()[1]

        def pose() -> bytes:
            sock, _ = false.accept()
            with sock:
                sock.sendall(store_wire.MAGIC + bytes(store_wire.NONCE_BYTES))
                said = sock.recv(store_wire.HELLO_BYTES, socket.MSG_WAITALL)
                sock.sendall(said[-store_wire.PROOF_BYTES :])
                return said

        posing = threads.submit(pose)
        with pytest.raises(GroupError, match="does not know the secret"):
            GroupStore.connect(
                StoreAddress(f"127.0.0.1:{port}", 7, KEY), lambda: DEADLINE_S, lambda: True
            )
        assert KEY.encode() not in posing.result(DEADLINE_S)


def test_a_proof_that_was_heard_once_opens_nothing(server: StoreServer) -> None:
    sock, greeting = probe_endpoint(server)
    nonce, number = os.urandom(store_wire.NONCE_BYTES), store_wire.GENERATION.pack(7)
    hello = nonce + number + store_wire.proof(KEY, "client", greeting, nonce, number)
    with sock:
        sock.sendall(hello)
        assert len(sock.recv(store_wire.PROOF_BYTES, socket.MSG_WAITALL)) == store_wire.PROOF_BYTES
    again, _ = probe_endpoint(server)
    with again:
        again.sendall(hello)
        assert again.recv(1) == b""


def test_a_crowd_of_strangers_costs_little_keeps_nobody_out_and_leaves_a_line(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(5)
    member = connected(server)
    member.set("k", "v")
    before = len(os.listdir("/proc/self/fd"))
    crowd = []
    with caplog.at_level(logging.WARNING, logger=store_server.__name__):
        for number in range(2 * store_server.STRANGERS_MAX):
            sock, _ = probe_endpoint(server)
            crowd.append(sock)
            if number % 3:
                sock.sendall(dice.randbytes(dice.randrange(1, 400)))
        # Each costs a descriptor on either side, and on ours only so many.
        ours = len(os.listdir("/proc/self/fd")) - before - len(crowd)
        assert ours <= store_server.STRANGERS_MAX + 2
        assert member.get("k") == b"v"
        assert connected(server).get("k") == b"v"
        for sock in crowd:
            sock.close()
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    told = [one for one in caplog.records if "stranger_turned_away" in one.getMessage()]
    assert len(told) == 1
    assert "127.0.0.1" in told[0].getMessage()


def test_a_member_that_sends_what_is_no_request_is_cut_and_harms_no_other(
    server: StoreServer,
) -> None:
    dice, other = random.Random(7), connected(server)
    other.set("k", "v")
    for _ in range(200):
        bad = connected(server)
        body = dice.randbytes(dice.randrange(0, 40))
        bad._sock.sendall(store_wire.LENGTH.pack(len(body)) + body)
        bad.cut()
    assert other.get("k") == b"v"
