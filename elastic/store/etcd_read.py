"""Paged reads from etcd: all pages show the store at one revision.

Rule: a page is small enough to arrive within the timeout of a try. After a small page the next
request is for more entries, so that thousands of small records need few requests; after a try
without a reply it is for fewer.
"""

from __future__ import annotations

import logging

import grpc

from elastic.errors import StoreUnavailable
from elastic.store.etcd_link import EtcdLink, EtcdRefusal, RequestUnanswered
from elastic.store.etcd_wire import RANGE
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

log = logging.getLogger(__name__)

PAGE = 16
"""Entries in the first request. An entry has 1 MiB at most, and pieces of a journal have half of
it: 8 MiB, which arrive within a try of 2 s at 50 Mbit/s."""
PAGE_MAX = 1024
SMALL_BYTES = 1024 * 1024
"""After a page smaller than this the number of entries is doubled."""
BEGINNINGS_MAX = 3


class _History(Exception):
    """The revision of the first page was compacted."""


async def read_range(link: EtcdLink, key: bytes, end: bytes) -> tuple[list[pb.KeyValue], int]:
    """Return all pairs from `key` up to `end`, and the revision of this snapshot.

    Raises:
        StoreUnavailable: a page had no reply in time, or the history was compacted during each
            of several tries.
        EtcdRefusal: etcd refused the request.
    """
    for _ in range(BEGINNINGS_MAX):
        try:
            return await _read_pages(link, key, end)
        except _History as error:
            log.info("read_begins_anew key=%r reason=%r", key, str(error))
    raise StoreUnavailable(
        f"etcd forgot the revision of a read of {key!r} before its last page, {BEGINNINGS_MAX} "
        f"times; see who compacts it so often, an hour of history is enough"
    )


async def _read_pages(link: EtcdLink, key: bytes, end: bytes) -> tuple[list[pb.KeyValue], int]:
    kvs: list[pb.KeyValue] = []
    limit, revision = PAGE, 0
    while True:
        request = pb.RangeRequest(key=key, range_end=end, limit=limit, revision=revision)
        try:
            answer = await _page(link, request)
        except EtcdRefusal as refusal:
            if revision and refusal.code is grpc.StatusCode.OUT_OF_RANGE:
                raise _History(refusal.details) from None
            raise
        kvs += answer.kvs
        # From the first page: later headers have the store's present revision.
        revision = revision or answer.header.revision
        if not answer.more:
            return kvs, revision
        key = answer.kvs[-1].key + b"\0"
        is_small = answer.ByteSize() < SMALL_BYTES
        limit = min(2 * request.limit, PAGE_MAX) if is_small else min(request.limit, PAGE)


async def _page(link: EtcdLink, request: pb.RangeRequest) -> pb.RangeResponse:
    """Return one page; after a try without a reply `request` is reduced to fewer entries."""
    patience = link.patience("read")
    while True:
        try:
            return await link.once(RANGE, request, patience.try_s())
        except RequestUnanswered as error:
            request.limit = max(1, min(request.limit, 2 * PAGE) // 2)
            await patience.pause(error)
