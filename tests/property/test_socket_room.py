"""Members of a group exchange whatever they like through sockets that hold next to nothing.

Whoever waits, for a message or for room, reads meanwhile: no order of sending, expecting, waiting
and flushing can make members wait for each other.
"""

from __future__ import annotations

import itertools
import random
import socket
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.worker.group.peer_sockets import PeerAddress, PeerSockets
from tests.effort import examples
from tests.patience import DEADLINE_S

ROUNDS = 4
BUFFER_BYTES = 4096
Sent = dict[tuple[int, int, int, int], bytes]
"""By round, sender, receiver and tag."""


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32))
def test_any_order_of_calls_ends_with_every_message_whole(size: int, seed: int) -> None:
    draw = random.Random(seed)
    messages = {
        (turn, sender, receiver, tag): draw.randbytes(draw.choice([1, 300, 40_000, 200_000]))
        for turn in range(ROUNDS)
        for sender in range(size)
        for receiver in range(size)
        for tag in range(3)
        if sender != receiver and draw.random() < 0.6
    }
    group = _joined(size)
    try:
        with ThreadPoolExecutor(size) as threads:
            running = [
                threads.submit(_take_part, peers, rank, messages, seed + rank)
                for rank, peers in enumerate(group)
            ]
            try:
                for one in running:
                    one.result(DEADLINE_S)
            finally:
                for peers in group:
                    peers.cut()
    finally:
        for peers in group:
            peers.close()


def _joined(size: int) -> list[PeerSockets]:
    """Peers whose connections hold next to nothing; Unix sockets, for TCP is slow when it is so
    short of room."""
    group = [PeerSockets(PeerAddress("127.0.0.1", DEADLINE_S)) for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            pair = socket.socketpair()
            for end, peers, other in zip(pair, (group[low], group[high]), (high, low), strict=True):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                peers._add(other, peers._tracked(end))
    return group


def _cut(data: bytes | bytearray, draw: random.Random) -> list[memoryview]:
    """The same bytes as views of some parts of them."""
    places = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(draw.randrange(3)))})
    view = memoryview(data)
    return [view[first:last] for first, last in itertools.pairwise(places)]


def _take_part(peers: PeerSockets, rank: int, messages: Sent, seed: int) -> None:
    """Do all that this rank does, in an order of its own."""
    draw = random.Random(seed)
    for turn in range(ROUNDS):
        mine = {key: data for key, data in messages.items() if key[0] == turn and rank in key[1:3]}
        got = {key: bytearray(len(data)) for key, data in mine.items() if key[2] == rank}
        # What others wait for leaves before we wait for them; some is expected only when waited for
        keys = draw.sample([*mine], len(mine))
        late = {key for key in got if draw.random() < 0.3}
        for key in keys:
            if key in got and key not in late:
                peers.expect(key[1], key[3], _cut(got[key], draw))
            elif key not in got:
                peers.send(key[2], key[3], _cut(mine[key], draw))
            if draw.random() < 0.1:
                peers.flush()
            if draw.random() < 0.1:
                peers.poll()
        for key in draw.sample([*got], len(got)):
            if key in late:
                peers.expect(key[1], key[3], _cut(got[key], draw))
            peers.wait(key[1], key[3])
            if draw.random() < 0.3:
                peers.flush()
        assert all(got[key] == mine[key] for key in got)
    peers.flush()
