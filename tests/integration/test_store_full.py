"""An etcd whose quota is full of history: what is said then, and that following it helps."""

from __future__ import annotations

import itertools
import json
import os
import re

import anyio
import pytest

from elastic.errors import StoreUnavailable
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Compare, Delete, Put
from tests.etcd_server import EtcdServer, find_etcd
from tests.patience import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

QUOTA_BYTES = 8 * 1024 * 1024
PIECE_BYTES = 512 * 1024


async def fill(store: EtcdStore) -> None:
    """Write what is removed again, until the history of it is too much."""
    for number in itertools.count():
        key, value = f"k/{number}", os.urandom(PIECE_BYTES)
        result = await store.commit([Compare(key, 0)], [Put(key, value)])
        await store.commit([Compare(key, result.revision)], [Delete(key)])


@pytest.mark.skipif(find_etcd() is None, reason="no etcd server")
async def test_a_full_etcd_is_met_with_what_to_do_and_goes_on_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", str(QUOTA_BYTES))
    # The project's own advice is taken by the server.
    monkeypatch.setenv("ETCD_AUTO_COMPACTION_MODE", "periodic")
    monkeypatch.setenv("ETCD_AUTO_COMPACTION_RETENTION", "1h")
    with EtcdServer() as server, anyio.fail_after(DEADLINE_S):
        store = EtcdStore([server.endpoint])
        with pytest.raises(StoreUnavailable, match="NOSPACE") as refused:
            await fill(store)
        steps = re.findall(r"'etcdctl (\w+)", str(refused.value))
        assert steps == ["compaction", "endpoint", "defrag", "alarm"]
        assert "--auto-compaction-retention 1h" in str(refused.value)
        with pytest.raises(StoreUnavailable, match="NOSPACE"):
            await store.grant_lease(2.0)
        history = {"revision": (await store.read("")).revision, "physical": True}
        server.member.ask("/v3/kv/compaction", json.dumps(history).encode())
        server.member.ask("/v3/maintenance/defragment", b"{}")
        member = server.member.status()["header"]["member_id"]
        alarm = {"action": "DEACTIVATE", "memberID": member, "alarm": "NOSPACE"}
        server.member.ask("/v3/maintenance/alarm", json.dumps(alarm).encode())
        await store.grant_lease(2.0)
        assert (await store.commit([Compare("a", 0)], [Put("a", b"1")])).committed
        await store.close()
