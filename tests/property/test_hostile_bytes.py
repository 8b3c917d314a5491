"""Hostile bytes where ours are expected: the store, the worker's pipe, the file of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic.coord.certs import init_authority
from elastic.coord.journal import Journal
from elastic.coord.leadership import LeaderKey, Leadership
from elastic.coord.roles import Role
from elastic.coord.tokens import Token, TokenList, create_token, read_tokens
from elastic.errors import ConfigError, CorruptRecord, NotAuthorized, PeerError, UsageError
from elastic.runtime.certificates import read_shown
from elastic.runtime.clock import SystemClock
from elastic.store.interface import Compare, Put
from elastic.store.memory import MemoryStore
from elastic.wire import codec_stream
from elastic.wire.async_pipe import AsyncPipe
from elastic.wire.codec_records import encode_record
from elastic.wire.frames import FRAME_BYTES_MAX, encode_frame
from tests.effort import examples
from tests.harness.shared_store import SharedMemoryStore
from tests.patience import DEADLINE_S
from tests.strategies import FROM_WORKER, RECORDS

bounded = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CLOCK = SystemClock()

# ------------------------------------------------------------------------------- the store

KEYS = st.sampled_from([
    "c/jobs/j-1", "c/jobs/", "c/jobs/a/b", "c/pieces/j-1/entry/0000-of-0001",
    "c/pieces/j-1/entry/0000-of-x", "c/pieces/j-1/entry/0001-of-0002", "c/pieces/j-1/entry/",
    "c/pieces/j-1/abc/0000-of-0001", "c/pieces/j-1", "c/pieces/", "c/pieces/j-1/entry/x/y",
    "c/pieces/j-1/entry/0000-of-99999999999999999999", "c/pieces/j-1/entry/0000-of--1",
    "c/pieces/j-1/entry/0000-of-٣",
])  # fmt: skip
VALUES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"pieces:abc", b"pieces:", b"pieces:\xff", b"pieces:entry:1", b""]),
    RECORDS.map(encode_record),
)


def load(entries: dict[str, bytes]) -> str:
    """Let a coordinator read a store that holds these entries; return "" or the refusal."""

    async def run() -> str:
        store = MemoryStore()
        holder = LeaderKey("a", "a:1", 1, "a")
        leadership = Leadership(store, "c", holder, CLOCK)
        await leadership.acquire(lambda _: None)
        for key, value in entries.items():
            await store.commit([Compare(key, 0)], [Put(key, value)])
        try:
            with anyio.fail_after(DEADLINE_S):
                await Journal(store, "c", leadership).load()
        except CorruptRecord as error:
            return str(error)
        finally:
            await store.close()
        return ""

    return asyncio.run(run())


@bounded
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
@example({"c/pieces/j-1/entry/0000-of-x": b"", "c/jobs/j-1": b"pieces:entry"})
def test_a_hostile_store_is_read_or_refused_by_the_key(entries: dict[str, bytes]) -> None:
    refusal = load(entries)
    assert not refusal or any(key in refusal or "j-1" in refusal for key in entries)


@bounded
@given(
    leader=st.one_of(
        st.none(), st.binary(max_size=40), st.sampled_from([b"[]", b"1", b"{}", b"[" * 100_000])
    ),
    term=st.one_of(
        st.none(), st.binary(max_size=20), st.sampled_from([b"-5", b"1e9", b"\xd9\xa3"])
    ),
    shared=st.booleans(),
)
def test_a_hostile_leader_key_is_outlived_or_refused(
    leader: bytes | None, term: bytes | None, shared: bool
) -> None:
    async def run() -> None:
        store = SharedMemoryStore() if shared else MemoryStore()
        for key, value in (("c/leader", leader), ("c/term", term)):
            if value is not None:
                await store.commit([Compare(key, 0)], [Put(key, value)])
        leadership = Leadership(store, "c", LeaderKey("a", "a:1", 1, "a"), CLOCK)
        refusal = ""
        try:
            # On a shared store whoever holds the key is waited for.
            with anyio.move_on_after(0.02 if shared and leader is not None else DEADLINE_S):
                await leadership.acquire(lambda _: None)
        except CorruptRecord as error:
            refusal = str(error)
        finally:
            await store.close()
        assert not refusal or "c/term" in refusal
        assert refusal or leadership.term or (shared and leader is not None)

    asyncio.run(run())


# -------------------------------------------------------------------------------- the pipe


def hear(stream: bytes) -> tuple[int, str]:
    """Let an agent read this from a worker that is gone then: messages, and the refusal."""

    async def run() -> tuple[int, str]:
        ours, theirs = socket.socketpair()
        pipe = AsyncPipe(ours, "process 1 (pid 2)")
        number = 0
        try:
            theirs.sendall(stream)
            theirs.close()
            with anyio.fail_after(DEADLINE_S):
                async for _ in pipe:
                    number += 1
        except PeerError as error:
            return number, str(error)
        finally:
            pipe.close()
        return number, ""

    return asyncio.run(run())


@bounded
@given(messages=st.lists(FROM_WORKER, max_size=3), data=st.data())
def test_a_damaged_stream_of_a_worker_is_refused_behind_the_whole_messages_before_it(
    messages: list[Any], data: st.DataObject
) -> None:
    frames = [encode_frame(codec_stream.FROM_WORKER.encode(message)) for message in messages]
    whole = b"".join(frames)
    kind = data.draw(st.sampled_from(["cut", "oversized", "empty", "garbage"]))
    if kind == "cut":
        cut = data.draw(st.integers(0, len(whole)))
        number, refusal = hear(whole[:cut])
        ends = [sum(map(len, frames[:count])) for count in range(len(frames) + 1)]
        assert number == max(i for i, end in enumerate(ends) if end <= cut)
        assert bool(refusal) == (cut not in ends)
        return
    tail = {
        "oversized": (FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"x" * 50,
        "empty": bytes(4),
        "garbage": encode_frame(b"\xff" * 30),
    }[kind]
    number, refusal = hear(whole + tail)
    assert number == len(messages)
    assert refusal


# ---------------------------------------------------------------------------------- tokens

TOKENS = [
    {
        "token_id": "aa", "name": "n", "role": "node", "digest": "0" * 64, "created_ns": 1,
        "expires_ns": 0, "revoked_ns": 0,
    },
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(TOKENS[0]))


@bounded
@given(content=st.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"version": 1, "tokens": 5}')
def test_a_file_that_holds_no_tokens_is_refused(content: bytes) -> None:
    refuse_or_read(content)


@bounded
@given(field=FIELDS, value=JSON)
def test_a_token_with_a_strange_field_is_refused_or_harmless(field: str, value: Any) -> None:
    record = {"version": 1, "tokens": [{**TOKENS[0], field: value}]}
    refuse_or_read(json.dumps(record).encode())


def refuse_or_read(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.json"
        path.write_bytes(content)
        path.chmod(0o600)
        refusal = ""
        try:
            tokens = TokenList(path, CLOCK)
            guesses = [tokens.caller(f"elt_{t.token_id}_guess") for t in read_tokens(path)]
        except UsageError as error:
            refusal, guesses = str(error), []
        assert not refusal or str(path) in refusal
        assert not any(guesses)


@bounded
@given(shown=st.text(max_size=80), cut=st.integers(0, 60))
def test_nothing_but_the_whole_token_opens(shown: str, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.json"
        right = create_token(
            path, Token(token_id="", name="", role=Role.READ, digest="", created_ns=1)
        )
        tokens = TokenList(path, CLOCK)
        caller = tokens.caller(right)
        assert caller is not None
        assert caller.role is Role.READ
        for wrong in (shown, right[: -1 - cut], right + "x", right.upper(), f" {right}"):
            assert tokens.caller(wrong) is None


def test_an_expired_or_revoked_token_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for changes, says in (({"expires_ns": 5}, "has expired"), ({"revoked_ns": 5}, "was revoked")):
        blank = Token(token_id="", name="", role=Role.READ, digest="", created_ns=1, **changes)
        shown = create_token(path, blank)
        with pytest.raises(NotAuthorized, match=says):
            TokenList(path, CLOCK).caller(shown)


# ------------------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Give a certificate, DER."""
    folder = tmp_path_factory.mktemp("pki")
    now = datetime.datetime.now(datetime.timezone.utc)
    made = init_authority(folder, ("localhost",), now)
    return ssl.PEM_cert_to_DER_cert((made / "tls.crt").read_text())


@bounded
@given(at=st.integers(0, 10_000), changed=st.binary(min_size=1, max_size=4))
def test_a_certificate_that_cannot_be_read_is_refused_and_nothing_else(
    shown: bytes, at: int, changed: bytes
) -> None:
    at %= len(shown)
    with contextlib.suppress(ConfigError):
        assert read_shown(shown[:at] + changed + shown[at + len(changed) :]).serial >= 0
    with contextlib.suppress(ConfigError):
        read_shown(shown[:at])
