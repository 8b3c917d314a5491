"""The protocol between members of a group and the leader's store, with its authentication.

    server   MAGIC, and 16 random bytes
    client   16 random bytes, the generation, a proof
    server   a proof
    then frames: four bytes of length, and a request or an answer

A proof is a hash of all bytes exchanged before, keyed with the generation's secret, so the secret
itself is never sent.

Rule: until its proof is verified, at most a fixed number of bytes is read from a client, and only
the generation in them is interpreted. What follows is not encrypted: this does not protect from
an attacker who can change packets in transit.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from enum import IntEnum

MAGIC = b"elastic store 1\n"
NONCE_BYTES = 16
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 32
GENERATION = struct.Struct(">Q")
HELLO_BYTES = NONCE_BYTES + GENERATION.size + PROOF_BYTES
LENGTH = struct.Struct(">I")
FRAME_BYTES_MAX = (1 << 31) - 1


class StoreVerb(IntEnum):
    """A request; the first byte of its frame. The first three have no answer."""

    SET = 1
    APPEND = 2
    MULTI_SET = 3
    ADD = 4
    MULTI_GET = 5
    WAIT = 6
    CHECK = 7
    COMPARE_SET = 8
    DELETE = 9
    COUNT = 10


UNANSWERED = (StoreVerb.SET, StoreVerb.APPEND, StoreVerb.MULTI_SET)
WAITING = (StoreVerb.MULTI_GET, StoreVerb.WAIT)
"""Their first field is how long they wait for keys, in milliseconds."""
DONE, TIMED_OUT = 0, 1
"""Status; the first byte of an answer."""


def proof(key: str, who: str, *messages: bytes) -> bytes:
    """Return what shows that `who`, "client" or "server", has the key, in this conversation."""
    secret = hashlib.blake2b(key.encode()).digest()
    words = who.encode() + b"\0" + b"".join(messages)
    return hashlib.blake2b(words, key=secret, digest_size=PROOF_BYTES).digest()


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(given, expected)


def packed(head: int, fields: Iterable[bytes]) -> bytes:
    """Return a frame: its length, a verb or a status, and the fields."""
    parts = [bytes([head])]
    for one in fields:
        parts += (LENGTH.pack(len(one)), one)
    body = b"".join(parts)
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> tuple[int, list[bytes]]:
    """Read a frame behind its length; ValueError if it is malformed."""
    fields, at = [], 1
    while at < len(body):
        start = at + LENGTH.size
        if start > len(body):
            raise ValueError("a frame that ends within a length")
        at = start + LENGTH.unpack_from(body, at)[0]
        if at > len(body):
            raise ValueError("a frame that ends within a field")
        fields.append(body[start:at])
    if not body:
        raise ValueError("an empty frame")
    return body[0], fields
