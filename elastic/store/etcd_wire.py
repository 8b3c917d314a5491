"""Conversion between etcd's messages and the store's types, and the paths of etcd's methods.

Rule: no IO. Only this module knows the layout of keys on the server: all below one root,

    ROOT/data/KEY       the entries
    ROOT/writers/NAME   one marker for each client, see elastic/store/etcd_commit.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elastic.errors import CorruptRecord, UsageError
from elastic.store.interface import Compare, Entry, Put, Write
from elastic.store.rules import encode_key, encode_prefix, end_of_prefix
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

DEFAULT_ROOT = "elastic"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Method(Generic[Answer]):
    """One of etcd's methods: its path, and the class of its replies."""

    path: str
    answer: type[Answer]

    def parse(self, data: bytes) -> Answer:
        """Decode a reply."""
        message: Any = self.answer
        parsed: Answer = message.FromString(data)
        return parsed


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)


class KeySpace:
    """Maps the keys of one store to keys on the server."""

    def __init__(self, root: str) -> None:
        """Use all keys below `root`, such as "elastic".

        Raises:
            UsageError: the root is empty, or not valid Unicode.
        """
        if not root.strip("/"):
            raise UsageError("the root of an etcd store is empty; expected a word like 'elastic'")
        self._data = encode_prefix(root.rstrip("/") + "/data/")
        self._writers = encode_prefix(root.rstrip("/") + "/writers/")

    def key(self, key: str) -> bytes:
        """Return an entry's key on the server."""
        return self._data + encode_key(key)

    def range(self, prefix: str) -> tuple[bytes, bytes]:
        """Return the key range on the server for a prefix: first key, and exclusive end."""
        start = self._data + encode_prefix(prefix)
        return start, end_of_prefix(start) or b"\0"

    def marker(self, name: str) -> bytes:
        """Return the key of a client's marker."""
        return self._writers + name.encode()

    def entry(self, kv: pb.KeyValue) -> Entry:
        """Return the entry of a pair that was read from our range.

        Raises:
            CorruptRecord: the key is not valid Unicode, so another program wrote it.
        """
        name = kv.key.removeprefix(self._data)
        try:
            key = name.decode()
        except UnicodeDecodeError:
            raise CorruptRecord(
                f"etcd key {kv.key!r} is no UTF-8: another program writes under this store's "
                f"prefix; give the store a prefix of its own"
            ) from None
        return Entry(key, kv.value, kv.mod_revision)

    def compares(self, compares: Sequence[Compare]) -> list[pb.Compare]:
        """Return comparisons of entries."""
        return [unchanged(self.key(item.key), item.mod_revision) for item in compares]

    def writes(self, writes: Sequence[Write]) -> list[pb.RequestOp]:
        return [
            put(self.key(write.key), write.value, write.lease)
            if isinstance(write, Put)
            else pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self.key(write.key)))
            for write in writes
        ]

    def reads(self, compares: Sequence[Compare]) -> list[pb.RequestOp]:
        """Return reads of the entries that were compared, each once."""
        return [read(key) for key in dict.fromkeys(self.key(item.key) for item in compares)]

    def found(self, responses: Iterable[pb.ResponseOp]) -> tuple[Entry, ...]:
        """Return the entries found by the reads of a transaction."""
        return tuple(self.entry(kv) for item in responses for kv in item.response_range.kvs)


def unchanged(key: bytes, mod_revision: int) -> pb.Compare:
    """Return the comparison that a key has this mod_revision; 0: it does not exist."""
    return pb.Compare(
        result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=mod_revision
    )


def put(key: bytes, value: bytes, lease: int) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def read(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))
