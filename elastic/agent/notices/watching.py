"""Watches all sources of notices of one agent until it ends.

Rule: a source that fails is restarted after `AGAIN_S`, and the same failure is logged once; the
agent continues without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from elastic.agent.notices.source import Notice, NoticeSource, Notify
from elastic.runtime.eventlog import quoted

log = logging.getLogger(__name__)

AGAIN_S = 30.0


async def watch_all(sources: Sequence[NoticeSource], notify: Notify) -> None:
    """Watch every source until cancelled; `notify` receives notices on this event loop."""
    async with anyio.create_task_group() as tasks:
        for source in sources:
            tasks.start_soon(_watch, source, notify)


async def _watch(source: NoticeSource, notify: Notify) -> None:
    logged = ""

    def pass_on(notice: Notice) -> None:
        log.warning("preemption_notice source=%s reason=%s", source.name, quoted(notice.reason))
        notify(notice)

    while True:
        try:
            await source.watch(pass_on)
            text = "it ended"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        if text != logged:
            logged = text
            log.error("notices_failed source=%s error=%s", source.name, quoted(text))
        await anyio.sleep(AGAIN_S)
