"""Copies from agent to agent over real sockets: whole, for those with the key, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.agent import copy_store, pushing
from elastic.agent.arenas import Arenas
from elastic.agent.copy_server import CONNECTIONS_MAX, CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.agent.pushing import Pushing
from elastic.core.copy_messages import DropCopy, Replicate
from elastic.core.events.agent import PushFailed
from elastic.core.world import HeldCopy, JobId, NodeId
from elastic.errors import NotAuthorized, PeerError, Refused
from elastic.runtime import copy_wire
from elastic.runtime.copy_wire import ASK, FETCH, GREETING, PUSH, Answer, Line, Request, calling
from elastic.runtime.rpc import parse_endpoint
from elastic.runtime.snapshot_memory import HEADER, MARK, MARKS_MAX, SENT_AT, Mark, whole

JOB = JobId("j1")
KEY = "a secret of this job"
DEADLINE_S = 60.0
BODY = os.urandom(3 << 20)


def mark_of(number: int = 1, generation: int = 1, body: bytes = BODY) -> Mark:
    return Mark(number, generation, 10 * number, 1, len(body) - 100, 7, 100, 9)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


@pytest.fixture
def store() -> CopyStore:
    found = CopyStore(lambda: None)
    found.grant(JOB, KEY)
    return found


@pytest.fixture
def server(store: CopyStore) -> Iterator[CopyServer]:
    found = CopyServer("127.0.0.1", store)
    found.start()
    yield found
    found.close()


def push(address: str, mark: Mark, body: bytes = BODY, *, key: str = KEY, good: bool = True) -> Any:
    with calling(address) as line:
        line.ask(Request(PUSH, JOB, mark), key)
        line.send_body(memoryview(body), lambda: good)
        return line.read_answer(key)


def fetch(address: str, key: str = KEY) -> bytes:
    with calling(address) as line:
        mark = line.ask(Request(ASK, JOB), key).mark
    assert mark is not None
    body = bytearray(mark.num_bytes)
    with calling(address) as line:
        line.ask(Request(FETCH, JOB, mark), key)
        line.read_body(memoryview(body))
    return bytes(body)


def test_what_was_pushed_is_fetched(server: CopyServer, store: CopyStore) -> None:
    push(server.address, mark_of())
    assert fetch(server.address) == BODY
    newer = os.urandom(1 << 20)
    push(server.address, mark_of(2, body=newer), newer)
    assert fetch(server.address) == newer
    assert store.held() == (HeldCopy(JOB, 1, 20),)


@pytest.mark.parametrize("how", ["torn", "cut off", "flipped"])
def test_a_push_that_fails_leaves_the_copy_before(
    server: CopyServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(server.address, mark_of())
    newer = os.urandom(1 << 20)
    with calling(server.address) as line:
        line.ask(Request(PUSH, JOB, mark_of(2, body=newer)), KEY)
        if how == "cut off":
            line._sock.sendall(newer[:1000])
        elif how == "torn":
            line.send_body(memoryview(newer), lambda: False)
        else:
            line.send_body(memoryview(newer), lambda: True, zlib.crc32(newer) ^ 1)
    assert fetch(server.address) == BODY
    wait_until(lambda: accepts(server.address, mark_of(3, body=newer), newer), "room for the next")
    assert fetch(server.address) == newer


def accepts(address: str, mark: Mark, body: bytes) -> bool:
    try:
        push(address, mark, body)
    except Refused:
        return False
    return True


def test_a_bit_that_flips_in_the_holder_is_seen_by_who_fetches(
    server: CopyServer, store: CopyStore
) -> None:
    push(server.address, mark_of())
    with store.reading(JOB, mark_of()) as (body, _):
        body[1234] ^= 1
    with pytest.raises(ValueError, match="CRC-32"):
        fetch(server.address)


@pytest.mark.parametrize("verb", [ASK, FETCH, PUSH])
@pytest.mark.parametrize(("job", "key"), [(JOB, "another key"), (JOB, ""), ("j2", KEY)])
def test_without_the_key_nothing_is_given_or_taken(
    server: CopyServer, store: CopyStore, verb: str, job: str, key: str
) -> None:
    push(server.address, mark_of())
    with (
        pytest.raises(NotAuthorized, match="nothing is held here under this key"),
        calling(server.address) as line,
    ):
        line.ask(Request(verb, job, mark_of()), key)
    assert fetch(server.address) == BODY


def test_the_key_does_not_travel(store: CopyStore) -> None:
    """Nor anything that another conversation could be opened with."""
    said = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        heard = bytearray()
        with ours, theirs:
            listening = Line(theirs, is_client=False).listen
            thread = threading.Thread(target=listening, args=(store.key_of,))
            thread.start()
            line = Line(Recorder(ours, heard), is_client=True)  # type: ignore[arg-type]
            with pytest.raises(ConnectionResetError):
                line.ask(Request(ASK, JOB), KEY)
            thread.join(DEADLINE_S)
        said.append(bytes(heard))
    assert said[0] != said[1]
    assert KEY.encode() not in said[0]


class Recorder:
    """A socket that remembers what was sent, and is closed when an answer is awaited."""

    def __init__(self, sock: socket.socket, heard: bytearray) -> None:
        self._sock, self._heard = sock, heard
        self._reads = 0

    def setsockopt(self, *args: Any) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        self._sock.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        self._heard += data
        self._sock.sendall(data)

    def recv(self, count: int) -> bytes:
        if len(self._heard) > 32:
            return b""
        return self._sock.recv(count)


def test_one_who_knows_no_key_cannot_play_a_holder() -> None:
    """A worker takes state from nobody who has not shown the secret."""
    ours, theirs = socket.socketpair()

    def lie() -> None:
        line = Line(theirs, is_client=False)
        line._send(GREETING + bytes(32))
        line._read(32)
        line._read_json()
        line._read(32)
        line.answer("a guess", Answer(mark_of()))

    thread = threading.Thread(target=lie)
    thread.start()
    with ours, theirs:
        with pytest.raises(NotAuthorized):
            Line(ours, is_client=True).ask(Request(ASK, JOB), KEY)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(32) + b"\xff\xff\xff\xff" + bytes(100),
        bytes(32) + b"\x00\x00\x00\x02[]" + bytes(32),
        bytes(32) + b"\x00\x00\x00\x02{}" + bytes(32),
        bytes(32) + b"\x00\x00\x04\x00" + b"[" * 1024 + bytes(32),
    ],
)
def test_garbage_costs_a_connection_and_no_more(server: CopyServer, said: bytes) -> None:
    for _ in range(2 * CONNECTIONS_MAX):
        with socket.create_connection(parse_endpoint(server.address), 5) as sock:
            sock.sendall(said)
    push(server.address, mark_of())
    assert fetch(server.address) == BODY


@pytest.mark.parametrize(
    "numbers",
    [
        [1] * 7,
        "12345678",
        [1.5] * 8,
        [-1] * 8,
        [1 << 64] * 8,
        [True] * 8,
        [0, *[1] * 7],
        [1 << 62] * 8,
    ],
)
def test_a_mark_that_cannot_be_is_refused(numbers: Any) -> None:
    with pytest.raises(PeerError):
        copy_wire._mark(numbers)


def test_a_peer_that_says_nothing_is_given_up(
    store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_wire, "TALK_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        Line(ours, is_client=False).listen(store.key_of)


def test_a_peer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_wire, "BODY_S", 0.2)
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.01):
                theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with ours, theirs:
        with pytest.raises(TimeoutError):
            Line(ours, is_client=True).read_body(memoryview(bytearray(1000)))
        over.set()
        thread.join(DEADLINE_S)


# ------------------------------------------------------------------- what is held


def test_a_group_that_is_over_brings_nothing_any_more(server: CopyServer) -> None:
    push(server.address, mark_of(5, generation=3))
    with pytest.raises(Refused, match=r"generation 3 is here, this one is of 2.*over"):
        push(server.address, mark_of(9, generation=2))


def test_a_copy_that_is_being_read_is_not_written_over(store: CopyStore) -> None:
    for number in (1, 2):
        with store.writing(JOB, mark_of(number), lambda: None) as (body, commit):
            body[:] = BODY
            commit(zlib.crc32(BODY))
        if number == 1:
            reading = store.reading(JOB, mark_of(1))
            reading.__enter__()
    with pytest.raises(Refused, match="being read"):
        store.writing(JOB, mark_of(3), lambda: None).__enter__()
    reading.__exit__(None, None, None)
    with store.writing(JOB, mark_of(3), lambda: None):
        pass
    assert store.mark_of(JOB) == mark_of(2)


def test_a_later_group_ends_the_push_of_one_that_is_over(store: CopyStore) -> None:
    """A host that lost its power in the middle must not keep out the next one for long."""
    ended = []
    with store.writing(JOB, mark_of(1, generation=1), lambda: ended.append(1)):
        with pytest.raises(Refused, match="on its way"):
            store.writing(JOB, mark_of(1, generation=1), lambda: None).__enter__()
        assert not ended
        with pytest.raises(Refused, match="on its way"):
            store.writing(JOB, mark_of(1, generation=2), lambda: None).__enter__()
        assert ended


def test_more_memory_than_there_is_is_refused(
    server: CopyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(server.address, mark_of())
    huge = mark_of(2)._replace(data_bytes=1 << 41)
    with pytest.raises(Refused, match="available on this node"):
        push(server.address, huge)
    assert fetch(server.address) == BODY


def test_a_node_holds_so_many_jobs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_store, "JOBS_MAX", 2)
    store = CopyStore(lambda: None)
    jobs = [JobId(f"j{number}") for number in range(4)]
    for job_id in jobs[:3]:
        store.grant(job_id, KEY)
    assert [store.key_of(job_id) for job_id in jobs] == ["", KEY, KEY, ""], "nothing lies of it"
    for job_id in jobs[1:3]:
        with store.writing(job_id, mark_of(), lambda: None) as (_, commit):
            commit(0)
    store.grant(jobs[3], KEY)
    assert [store.key_of(job_id) for job_id in jobs] == ["", KEY, KEY, ""]


def test_dropping_ends_what_comes_and_frees_what_is_there(store: CopyStore) -> None:
    ended = []
    with store.writing(JOB, mark_of(), lambda: ended.append(1)) as (_, commit):
        store.drop(DropCopy(JOB, "over"))
        commit(0)
    assert ended
    assert store.held() == ()
    with pytest.raises(Refused, match="nothing is held"):
        store.mark_of(JOB)


def test_a_copy_that_came_after_it_was_decided_to_free_an_older_one_stays(
    server: CopyServer, store: CopyStore
) -> None:
    push(server.address, mark_of(2))
    newest = store.mark_of(JOB)
    assert not store.drop(DropCopy(JOB, "over", NodeId(""), newest.generation, newest.steps - 1))
    assert fetch(server.address) == BODY
    assert store.key_of(JOB) == KEY
    assert store.drop(DropCopy(JOB, "over", NodeId(""), newest.generation, newest.steps))
    assert store.held() == ()


# ------------------------------------------------------------------- pushing


class Source:
    """A node whose workers write snapshots, and that pushes them."""

    def __init__(self) -> None:
        self.arenas = Arenas()
        self.failed: list[PushFailed] = []
        self.pushing = Pushing(self.arenas, self.failed.append)
        self.arenas.give(JOB, 1)

    def snapshot(self, mark: Mark, body: bytes = BODY) -> None:
        descriptor = self.arenas.descriptors(JOB)[mark.number % 2]
        os.pwrite(descriptor, bytes(MARK.size), 0)
        os.pwrite(descriptor, body, HEADER)
        os.pwrite(descriptor, MARK.pack(*mark), 0)

    def close(self) -> None:
        self.pushing.close()
        self.arenas.close()


def order(address: str, every: int = 10, key: str = KEY) -> Replicate:
    return Replicate(JOB, NodeId("n2"), address, key, every)


async def wait_for(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.01)


def test_snapshots_are_pushed_as_often_as_is_wanted(server: CopyServer, store: CopyStore) -> None:
    async def story() -> None:
        source = Source()
        source.pushing.order(order(server.address, every=20))
        source.snapshot(mark_of(1))
        await wait_for(lambda: bool(store.held()), "the first copy")
        source.snapshot(mark_of(2))
        await wait_for(lambda: store.held()[0].steps == 20, "the next that is due")
        source.snapshot(mark_of(3))
        source.snapshot(mark_of(4))
        await wait_for(lambda: store.held()[0].steps == 40, "the next that is due")
        assert not source.failed
        source.close()

    asyncio.run(story())
    assert fetch(server.address) == BODY


def test_a_node_that_does_not_answer_is_told_of_and_tried_again(
    server: CopyServer, store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "PATIENCE_S", 0.1)
    monkeypatch.setattr(pushing, "RETRY_S", 0.05)

    async def story() -> None:
        source = Source()
        source.snapshot(mark_of(1))
        source.pushing.order(order(server.address, key="an old key"))
        await wait_for(lambda: bool(source.failed), "the failure")
        assert source.failed[0].node_id == "n2"
        store.grant(JOB, "an old key")
        await wait_for(lambda: bool(store.held()), "the copy")
        source.close()

    asyncio.run(story())


def test_an_order_ends_with_the_memory_of_the_job_and_can_come_again(
    server: CopyServer, store: CopyStore
) -> None:
    async def story() -> None:
        source = Source()
        source.pushing.order(order(server.address))
        task = source.pushing._tasks[JOB][1]
        source.arenas.close()
        await wait_for(task.done, "the end of the task")
        source.arenas.give(JOB, 2)
        source.snapshot(mark_of(1))
        source.pushing.order(order(server.address))
        await wait_for(lambda: bool(store.held()), "the copy")
        source.close()

    asyncio.run(story())


def test_an_order_that_is_said_again_brings_what_was_brought_once_more(
    server: CopyServer, store: CopyStore
) -> None:
    """The node may have lost it."""

    async def story() -> None:
        source = Source()
        source.snapshot(mark_of(1))
        source.pushing.order(order(server.address))
        await wait_for(lambda: bool(store.held()), "the copy")
        task = source.pushing._tasks[JOB][1]
        store.drop(DropCopy(JOB, "lost"))
        store.grant(JOB, KEY)
        source.pushing.order(order(server.address))
        await wait_for(lambda: bool(store.held()), "the copy again")
        assert source.pushing._tasks[JOB][1] is task, "nothing that was under way was ended"
        source.close()

    asyncio.run(story())
    assert fetch(server.address) == BODY


def test_what_changes_while_it_is_sent_does_not_count(
    server: CopyServer, store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes its next snapshot in the middle spoils the copy, and another is sent."""
    source_of: list[Source] = []
    honest = Line.send_body

    def spoiled(self: Line, body: memoryview, is_whole: Any, crc: int | None = None) -> bool:
        monkeypatch.setattr(Line, "send_body", honest)
        descriptor = source_of[0].arenas.descriptors(JOB)[1]
        assert os.pread(descriptor, 8, SENT_AT) != bytes(8)  # Workers see that it is sent.
        os.pwrite(descriptor, bytes(MARK.size), 0)
        return honest(self, body, is_whole, crc)

    async def story() -> None:
        source = Source()
        source_of.append(source)
        source.snapshot(mark_of(1))
        monkeypatch.setattr(Line, "send_body", spoiled)
        source.pushing.order(order(server.address))
        await wait_for(lambda: Line.send_body is honest, "the first push")
        source.snapshot(mark_of(2))
        await wait_for(lambda: bool(store.held()), "a copy")
        assert store.held()[0].steps == 20
        assert not source.failed
        for descriptor in source.arenas.descriptors(JOB):
            await wait_for(
                lambda d=descriptor: os.pread(d, 8, SENT_AT) in (b"", bytes(8)), "the end"
            )
        source.close()

    asyncio.run(story())


def test_marks_never_reach_what_says_that_a_slot_is_sent() -> None:
    assert MARKS_MAX * MARK.size == SENT_AT == HEADER - MARK.size
    assert whole(bytes(HEADER)) is None
    assert whole(b"") is None
