"""Members of a mesh exchange whatever they like through sockets that hold next to nothing.

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
    meshes = _joined(size)
    try:
        with ThreadPoolExecutor(size) as threads:
            running = [
                threads.submit(_take_part, mesh, rank, messages, seed + rank)
                for rank, mesh in enumerate(meshes)
            ]
            try:
                for one in running:
                    one.result(DEADLINE_S)
            finally:
                for mesh in meshes:
                    mesh.cut()
    finally:
        for mesh in meshes:
            mesh.close()


def _joined(size: int) -> list[PeerSockets]:
    """Meshes whose connections hold next to nothing; Unix sockets, for TCP is slow when it is so
    short of room."""
    meshes = [PeerSockets(PeerAddress("127.0.0.1", DEADLINE_S)) for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            pair = socket.socketpair()
            for end, mesh, other in zip(
                pair, (meshes[low], meshes[high]), (high, low), strict=True
            ):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                mesh._add(other, mesh._tracked(end))
    return meshes


def _cut(data: bytes | bytearray, draw: random.Random) -> list[memoryview]:
    """The same bytes as views of some parts of them."""
    places = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(draw.randrange(3)))})
    view = memoryview(data)
    return [view[first:last] for first, last in itertools.pairwise(places)]


def _take_part(mesh: PeerSockets, rank: int, messages: Sent, seed: int) -> None:
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
                mesh.expect(key[1], key[3], _cut(got[key], draw))
            elif key not in got:
                mesh.send(key[2], key[3], _cut(mine[key], draw))
            if draw.random() < 0.1:
                mesh.flush()
            if draw.random() < 0.1:
                mesh.poll()
        for key in draw.sample([*got], len(got)):
            if key in late:
                mesh.expect(key[1], key[3], _cut(got[key], draw))
            mesh.wait(key[1], key[3])
            if draw.random() < 0.3:
                mesh.flush()
        assert all(got[key] == mine[key] for key in got)
    mesh.flush()
