"""A coordinator whose loop hangs ends, one that gets on does not."""

from __future__ import annotations

import threading

import anyio
import pytest

from elastic.coord.watchdog import Watchdog
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio


async def test_a_loop_that_hangs_ends_the_process() -> None:
    ended = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Watchdog(end=ended.set, beat_s=0.01, turns_max=5).keep)
        await anyio.wait_all_tasks_blocked()
        # Nothing else runs in this loop meanwhile: it hangs.
        assert ended.wait(DEADLINE_S)
        tasks.cancel_scope.cancel()


async def test_one_that_ends_in_order_is_watched_no_more() -> None:
    ended = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Watchdog(end=ended.set, beat_s=0.01, turns_max=500).keep)
        await anyio.wait_all_tasks_blocked()
        (thread,) = [one for one in threading.enumerate() if one.name == "watchdog"]
        tasks.cancel_scope.cancel()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not ended.is_set()
