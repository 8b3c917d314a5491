"""What members of a group let each other know beside steps and state.

Rule: what is shared is shared by all of them at the same place in the run. A note in the group's
store is left by one, and read by whoever likes to know. All of it raises RuntimeError if the group
breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from elastic.core.policy.cursor import Cursor
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine.logbook import Logbook
from elastic.worker.group.c10d import default_store
from elastic.worker.group.member_links import share_bytes
from elastic.worker.reduce.step_metadata import send_metadata


def share_book(group: Any, book: StreamBook, cursor: Cursor) -> bool:
    """Let every member know where every stream can be continued; returns True.

    So that, when one of them dies, the next reader of its streams need not count from their first
    sample.
    """
    if group.size() > 1:
        book.receive(share_bytes(group, book.sent(cursor)))
    return True


def share_latest(group: Any, cursors: Sequence[Cursor], logbook: Logbook) -> None:
    """Send an epoch's last values to those who have not passed its gate, as others have."""
    furthest = max(cursors)
    if min(cursors) < furthest:
        rows = send_metadata(group, logbook.latest_row())
        if cursors[group.rank()] < furthest:
            logbook.take_latest(rows[cursors.index(furthest)])


BEGUN, INSIDE = "begun", "inside"


def note_loop_begun(*, is_inside: bool) -> None:
    """Let a new group know that we do not come from the script's beginning, but are in its loop.

    `is_inside`: in a pass, and no more at the head of its epoch.
    """
    if (store := loop_store()) is not None:
        for key in (BEGUN, INSIDE) if is_inside else (BEGUN,):
            store.set(key, b"1")


def others_have_begun(*, is_inside: bool) -> bool:
    """Return whether any member has noted that; known soon after the group is formed.

    Args:
        is_inside: it is in a pass; if not, it has begun the loop.
    """
    store = loop_store()
    return store is not None and bool(store.check([INSIDE if is_inside else BEGUN]))


def loop_store() -> Any:
    """Return the store of our group for what its members note; None without a group."""
    store = default_store()
    return None if store is None else dist.PrefixStore("loop", store)
