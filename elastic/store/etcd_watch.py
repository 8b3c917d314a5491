"""A watch on etcd that survives the loss of its server.

Rule: a watch resumes at the revision of the last delivered change, plus one, and only changes
advance it: the revisions in replies to create and progress requests are not ordered with the
changes. A silent stream is probed with a progress request; without a reply the watch moves to the
next endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from elastic.errors import Compacted, NotAuthorized, StoreError
from elastic.store.etcd_link import (
    LOGIN_NEEDED,
    STALE_LOGIN,
    TRY_S,
    EtcdLink,
    EtcdRefusal,
    RequestUnanswered,
    pause_s,
)
from elastic.store.etcd_wire import WATCH, KeySpace
from elastic.store.interface import Change
from elastic.store.rules import closed
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""After this long without a message the server is probed, and has TRY_S to reply."""
DENIALS = ("permission denied", *LOGIN_NEEDED, *STALE_LOGIN)
DENIALS_MAX = 2
"""etcd also refuses an expired token with "permission denied": log in again once."""


async def watch_prefix(
    link: EtcdLink, keys: KeySpace, prefix: str, from_revision: int
) -> AsyncGenerator[Change, None]:
    """Yield every change under a prefix since a revision; see `Store.watch`."""
    next_revision, failures, denials = from_revision, 0, 0
    while True:
        try:
            async with _opened(link, _request(keys, prefix, next_revision)) as stream:
                while True:
                    response = await stream.next()
                    _refuse_ended(response, next_revision)
                    failures, denials = 0, 0
                    # All changes of one revision come in one response.
                    for event in response.events:
                        if event.kv.mod_revision >= next_revision:
                            yield keys.change(event)
                    if response.events:
                        last = response.events[-1].kv.mod_revision
                        next_revision = max(next_revision, last + 1)
        except RequestUnanswered as error:
            failures += 1
            if failures == 1:
                log.warning(
                    "watch_interrupted prefix=%s next=%d error=%r",
                    prefix,
                    next_revision,
                    str(error),
                )
        except NotAuthorized as error:
            denials += 1
            if denials >= DENIALS_MAX:
                raise
            link.login_again(str(error))
        except EtcdRefusal as refusal:
            raise StoreError(f"etcd refuses a watch: {refusal}; compare its version") from None
        await _pause(link, pause_s(failures, len(link.endpoints)))


def _request(keys: KeySpace, prefix: str, next_revision: int) -> pb.WatchRequest:
    """Return a request for a watch that starts one revision early.

    A compaction at revision r may drop the deletions of r too, but etcd refuses only watches from
    before r. Starting one revision early, every watch that may have lost a change is refused.
    """
    key, end = keys.range(prefix)
    create = pb.WatchCreateRequest(key=key, range_end=end, start_revision=max(1, next_revision - 1))
    return pb.WatchRequest(create_request=create)


def _refuse_ended(response: pb.WatchResponse, next_revision: int) -> None:
    """Raise the error for a watch that the server has ended."""
    if response.compact_revision:
        raise Compacted(next_revision, response.compact_revision + 1)
    if not response.canceled:
        return
    if any(words in response.cancel_reason for words in DENIALS):
        raise NotAuthorized(
            f"etcd refuses a watch: {response.cancel_reason}; give the store a user that may read "
            f"its prefix"
        )
    if "leader" in response.cancel_reason or not response.cancel_reason:
        raise RequestUnanswered(response.cancel_reason or "the server ended the watch")
    raise StoreError(f"etcd ended a watch: {response.cancel_reason}")


class _Stream:
    """One open stream; a read also ends on silence, and when the store is closed."""

    def __init__(
        self, link: EtcdLink, call: grpc.aio.StreamStreamCall[Any, Any], index: int
    ) -> None:
        self._link = link
        self._call = call
        self._index = index
        # Kept after a timeout: cancelling a read would cancel the stream.
        self._reading: asyncio.Future[Any] | None = None
        self._closing = asyncio.ensure_future(link.closing.wait())

    async def next(self) -> pb.WatchResponse:
        """Return the next response; after a silence, send a probe.

        Raises:
            RequestUnanswered: the stream broke, or its server is silent.
        """
        response = await self._read(SILENCE_S)
        if response is None:
            probe = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
            await self.write(probe)
            response = await self._read(TRY_S)
        if response is None:
            raise self._link.unanswered(
                self._index, f"the watch is silent for {SILENCE_S + TRY_S:g} s"
            )
        return response

    async def write(self, request: pb.WatchRequest) -> None:
        """Send a request.

        Raises:
            RequestUnanswered: the stream broke.
        """
        try:
            await asyncio.wait_for(self._call.write(request), TRY_S)
        except grpc.aio.AioRpcError as error:
            raise self._link.judged(error, self._index) from None
        except (asyncio.TimeoutError, asyncio.InvalidStateError) as error:
            raise self._link.unanswered(self._index, f"writing to a watch: {error!r}") from None

    async def close(self) -> None:
        """End the stream and its pending read."""
        self._call.cancel()
        waiting = [self._closing, *([self._reading] if self._reading is not None else [])]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _read(self, timeout_s: float) -> pb.WatchResponse | None:
        """Return the next response, None if there is none in time."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        await asyncio.wait(
            {self._reading, self._closing},
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._closing.done():
            raise closed()
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            response = reading.result()
        except grpc.aio.AioRpcError as error:
            raise self._link.judged(error, self._index) from None
        if response is grpc.aio.EOF:
            raise self._link.unanswered(self._index, "the server ended the watch's stream")
        answer: pb.WatchResponse = response
        return answer


@asynccontextmanager
async def _opened(link: EtcdLink, request: pb.WatchRequest) -> AsyncIterator[_Stream]:
    """Open a stream and create a watch on it for the block.

    Raises:
        RequestUnanswered: the request could not be sent in time.
    """
    async with link.stream(WATCH, None) as (call, index):
        stream = _Stream(link, call, index)
        try:
            await stream.write(request)
            yield stream
        finally:
            await stream.close()


async def _pause(link: EtcdLink, seconds: float) -> None:
    """Wait before the next try; raises at once when the store is closed."""
    try:
        await asyncio.wait_for(link.closing.wait(), seconds)
    except asyncio.TimeoutError:
        return
    raise closed()
