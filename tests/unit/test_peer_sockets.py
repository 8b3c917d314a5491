"""Direct connections between members: messages in order, by tag; strangers, cuts and lost peers."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.worker.engine.outcome import is_group_broken
from elastic.worker.group import peer_sockets
from elastic.worker.group.peer_sockets import (
    HEADER,
    HELLO,
    LARGE,
    PeerAddress,
    PeerEndpoint,
    PeerSockets,
)
from tests.effort import examples
from tests.patience import DEADLINE_S, wait_for

REACH = PeerAddress("127.0.0.1", DEADLINE_S)


@contextlib.contextmanager
def members(size: int, reach: PeerAddress = REACH) -> Iterator[list[PeerSockets]]:
    """Meshes of a whole group, connected."""
    group = [PeerSockets(reach) for _ in range(size)]
    endpoints = [sockets.endpoint for sockets in group]
    try:
        at_once([lambda r=r, m=m: m.join(r, endpoints, DEADLINE_S) for r, m in enumerate(group)])
        yield group
    finally:
        for sockets in group:
            sockets.close()


def at_once(calls: list[Callable[[], object]]) -> None:
    """Do all of these, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for future in [threads.submit(call) for call in calls]:
            future.result(DEADLINE_S)


def take(sockets: PeerSockets, rank: int, tag: int, size: int) -> bytes:
    """Wait for a message."""
    data = bytearray(size)
    sockets.expect(rank, tag, [memoryview(data)])
    sockets.wait(rank, tag)
    return bytes(data)


def give(sockets: PeerSockets, rank: int, tag: int, data: bytes) -> None:
    sockets.send(rank, tag, [memoryview(data)])


def give_for_ever(sockets: PeerSockets, rank: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        give(sockets, rank, 1, bytes(1000))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everyone_hears_everyone(size: int) -> None:
    with members(size) as group:
        for rank, sockets in enumerate(group):
            for other in range(size):
                if other != rank:
                    give(sockets, other, 7, b"%d to %d" % (rank, other))
        for rank, sockets in enumerate(group):
            for other in range(size):
                if other != rank:
                    assert take(sockets, other, 7, 6) == b"%d to %d" % (other, rank)


@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_each_tag_keeps_its_order_whenever_it_is_expected(data: st.DataObject) -> None:
    sent = data.draw(st.lists(st.tuples(st.integers(1, 3), st.binary(min_size=1)), max_size=12))
    by_tag: dict[int, list[bytes]] = {}
    for tag, text in sent:
        by_tag.setdefault(tag, []).append(text)
    order = data.draw(st.permutations([tag for tag, _ in sent]))
    with members(2) as (one, other):
        for tag, text in sent:
            give(one, 1, tag, text)
        for tag in order:
            expected = by_tag[tag].pop(0)
            assert take(other, 0, tag, len(expected)) == expected


def test_what_is_expected_beforehand_goes_where_it_belongs() -> None:
    with members(2) as (one, other):
        places = [bytearray(3), bytearray(3)]
        for tag, place in enumerate(places):
            other.expect(0, tag, [memoryview(place)])
        give(one, 1, 1, b"two")
        give(one, 1, 0, b"one")
        other.wait(0, 0)
        other.wait(0, 1)
        assert places == [b"one", b"two"]


def test_what_is_forgotten_leaves_no_memory_behind() -> None:
    with members(2) as (one, other):
        place = bytearray(3)
        other.expect(0, 7, [memoryview(place)])
        other.forget(0, 7)
        place += b"more"  # BufferError while a view of it is held.
        give(one, 1, 8, b"two")
        assert take(other, 0, 8, 3) == b"two"


def test_all_may_send_more_than_the_kernel_holds_before_anyone_reads() -> None:
    size = 8 << 20
    with members(3) as group:
        texts = [bytes([rank]) * size for rank in range(3)]

        def exchange(rank: int) -> None:
            others = [other for other in range(3) if other != rank]
            for other in others:
                give(group[rank], other, 1, texts[rank])
            for other in others:
                assert take(group[rank], other, 1, size) == texts[other]
            group[rank].flush()

        at_once([lambda rank=rank: exchange(rank) for rank in range(3)])


@pytest.mark.parametrize("how", ["cut", "close"])
def test_a_peer_that_ends_is_a_broken_group(how: str) -> None:
    with members(2) as (one, other):
        give(one, 1, 5, b"last")
        getattr(one, how)()
        assert take(other, 0, 5, 4) == b"last"
        with pytest.raises(RuntimeError, match="closed by peer, rank 0") as raised:
            take(other, 0, 5, 4)
        assert is_group_broken(raised.value)


def test_a_cut_frees_whoever_waits() -> None:
    with members(2) as (one, _):
        waiting = threading.Event()
        failed: list[BaseException] = []

        def wait() -> None:
            waiting.set()
            try:
                take(one, 1, 1, 10)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(DEADLINE_S)
        one.cut()
        thread.join(DEADLINE_S)
        assert len(failed) == 1
        assert is_group_broken(failed[0])


def test_a_cut_ends_joining() -> None:
    sockets, other = PeerSockets(REACH), PeerSockets(REACH)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(sockets.join, 0, [sockets.endpoint, other.endpoint], DEADLINE_S)
        # A cut before it listens counts, too: so no moment is the wrong one.
        sockets.cut()
        with pytest.raises(OSError, match=r"."):
            joining.result(DEADLINE_S / 2)
    sockets.close()
    other.close()


def test_whoever_stays_silent_too_long_is_named() -> None:
    with members(2, PeerAddress("127.0.0.1", 0.05)) as (one, _):
        with pytest.raises(RuntimeError, match="timed out after 0 s waiting for rank 1") as raised:
            take(one, 1, 1, 1)
        assert is_group_broken(raised.value)


def test_a_wait_may_be_long() -> None:
    with members(2, PeerAddress("127.0.0.1", 1e9)) as (one, other):
        threading.Timer(0.05, give, [other, 0, 1, b"late"]).start()
        assert take(one, 1, 1, 4) == b"late"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_frees_whoever_connects(rank: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=1) as silent,
        contextlib.ExitStack() as held,
    ):
        endpoint = PeerEndpoint("127.0.0.1", silent.getsockname()[1])
        for _ in range(3):  # More than it takes: who comes now is not answered.
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", endpoint.port))
        sockets = PeerSockets(REACH)
        endpoints = [endpoint, sockets.endpoint] if rank else [sockets.endpoint, endpoint]
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(sockets.join, rank, endpoints, DEADLINE_S)
            wait_for(lambda: len(sockets._socks) >= 1 + rank)
            sockets.cut()  # Also between two lines of `join`: it must not connect after this.
            with pytest.raises(OSError, match=r"."):
                joining.result(DEADLINE_S / 2)
        sockets.close()


def test_sigpipe_does_not_end_who_sends_to_a_dead_peer() -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with members(2) as (one, other):
            other.close()
            with pytest.raises(RuntimeError, match="closed by peer, rank 1"):
                give_for_ever(one, 1)
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_strangers_are_turned_away() -> None:
    one, other = PeerSockets(REACH), PeerSockets(REACH)
    endpoints = [one.endpoint, other.endpoint]
    where = (one.endpoint.address, one.endpoint.port)
    strangers = [socket.create_connection(where) for _ in range(5)]
    strangers[0].close()
    strangers[1].sendall(b"GET / HTTP/1.0\r\n\r\n" * 3)
    strangers[2].sendall(HELLO.pack(bytes(16), 1))
    strangers[3].sendall(HELLO.pack(one.endpoint.token, 7))
    strangers[4].sendall(b"half")
    at_once(
        [lambda: one.join(0, endpoints, DEADLINE_S), lambda: other.join(1, endpoints, DEADLINE_S)]
    )
    give(other, 0, 1, b"hello")
    assert take(one, 1, 1, 5) == b"hello"
    for sock in strangers:
        sock.close()
    one.close()
    other.close()


def test_strangers_who_say_nothing_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sockets, "STRANGERS_MAX", 20)
    one, other = PeerSockets(REACH), PeerSockets(REACH)
    endpoints = [one.endpoint, other.endpoint]
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            where = (one.endpoint.address, one.endpoint.port)
            stack.enter_context(socket.create_connection(where))
        joining = threading.Thread(target=one.join, args=(0, endpoints, DEADLINE_S))
        joining.start()
        # All of them are heard before the member comes.
        wait_for(lambda: 2 <= len(one._socks) <= 21 and not backlog(one))
        other.join(1, endpoints, DEADLINE_S)
        joining.join()
    give(other, 0, 1, b"hello")
    assert take(one, 1, 1, 5) == b"hello"
    assert len(one._socks) == 1
    one.close()
    other.close()


def backlog(sockets: PeerSockets) -> int:
    """Return how many connections wait to be accepted."""
    info = sockets._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int.from_bytes(info[24:28], "little")  # tcpi_unacked


def test_a_member_that_does_not_come_is_not_waited_for_long() -> None:
    sockets, other = PeerSockets(REACH), PeerSockets(REACH)
    with pytest.raises(OSError, match="timed out"):
        sockets.join(0, [sockets.endpoint, other.endpoint], 0.05)
    other.close()
    with pytest.raises(OSError, match=r"."):
        sockets.join(1, [other.endpoint, sockets.endpoint], 0.05)
    sockets.close()


def test_a_message_of_another_length_is_refused() -> None:
    with members(2) as (one, other):
        give(one, 1, 1, b"four")
        with pytest.raises(RuntimeError, match="rank 0 sent 4 bytes with tag 1, expected 5"):
            take(other, 0, 1, 5)
    with members(2) as (one, other):
        give(one, 1, 1, b"four")
        give(one, 1, 2, b"x")
        assert take(other, 0, 2, 1) == b"x"
        with pytest.raises(RuntimeError, match="rank 0 sent 4 bytes with tag 1, expected 5"):
            take(other, 0, 1, 5)


@pytest.mark.parametrize("size", [-1, 0, peer_sockets.BYTES_MAX + 1])
def test_nonsense_is_refused_before_memory_is_given_to_it(size: int) -> None:
    with members(2) as (one, other):
        one._peers[1].sock.sendall(HEADER.pack(3, size))
        with pytest.raises(RuntimeError, match=f"rank 0 announces a message of {size} bytes"):
            take(other, 0, 1, 5)


def test_large_messages_wait_for_their_receivers_and_arrive_in_place() -> None:
    size = 8 << 20
    with members(3) as group:
        texts = [bytes([rank + 1]) * size for rank in range(3)]
        places = [[bytearray(5), bytearray(), bytearray(size - 5)] for _ in range(2)]

        def exchange(rank: int) -> None:
            give(group[rank], (rank + 1) % 3, 9, b"any length")
            sends: dict[int, list[memoryview]] = {}
            receives = {other: [memoryview(one) for one in places[other]] for other in (0, 1)}
            if rank < 2:  # These two also send to each other.
                sends = {2: [memoryview(texts[rank])], 1 - rank: [memoryview(b"1")]}
                receives = {1 - rank: [memoryview(bytearray(1))]}
            group[rank].exchange(sends, receives)
            assert not any(peer.early.get(LARGE) for peer in group[rank]._peers.values())
            assert group[rank].receive((rank - 1) % 3, 9) == b"any length"

        at_once([lambda rank=rank: exchange(rank) for rank in range(3)])
        assert [b"".join(one) for one in places] == texts[:2]
