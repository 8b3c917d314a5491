"""Preemption of a Google Cloud machine, by its metadata server.

A spot machine gets a notice 30 seconds before it ends. A machine that cannot be migrated live (one
with GPUs) gets a notice of maintenance that ends it, usually an hour before. Live migration ends
nothing, and is ignored.

The server replies when a value changes, or after the timeout in the query (long polling): a notice
is seen at once, at one query a minute. A reply without `Metadata-Flavor: Google` comes from another
server, and is ignored.

Source: the documentation of Compute Engine, "Preemptible VM instances" and "About VM metadata".
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import anyio

from elastic.agent.notices.metadata import TIMEOUT_S, MetadataEndpoint
from elastic.agent.notices.source import Notice, Notify

ADDRESS = "metadata.google.internal"
ROOT = "/computeMetadata/v1/instance"
WAIT_S = 60
RETRY_S = 5.0
PREEMPTION_S = 30.0
MAINTENANCE_S = 3600.0
FLAVOR = {"Metadata-Flavor": "Google"}
OK = 200


@dataclass(frozen=True)
class Gcp:
    """Preemption and maintenance of one machine.

    Attributes:
        wait_s: how long the server may hold a query whose value does not change.
        retry_s: pause after a query without a valid reply.
    """

    name = "gcp"
    endpoint: MetadataEndpoint
    wait_s: int = WAIT_S
    retry_s: float = RETRY_S

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with each new notice, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for key in ("preempted", "maintenance-event"):
                tasks.start_soon(self._follow, key, notify)

    async def _follow(self, key: str, notify: Notify) -> None:
        """Query one value repeatedly; each change is handled once."""
        etag, last = "", ""
        while True:
            path = f"{ROOT}/{key}"
            if etag:
                wait = f"wait_for_change=true&timeout_sec={self.wait_s}&last_etag={quote(etag)}"
                path = f"{path}?{wait}"
            timeout_s = TIMEOUT_S + (self.wait_s if etag else 0)
            answer = await self.endpoint.request(path, headers=FLAVOR, timeout_s=timeout_s)
            is_good = (
                answer is not None
                and answer.status == OK
                and answer.headers.get("metadata-flavor", "").lower() == "google"
            )
            if answer is None or not is_good:
                etag = ""
                await anyio.sleep(self.retry_s)
                continue
            before, etag = etag, answer.headers.get("etag", "")
            value = answer.text.strip().upper()
            if value != last:
                last = value
                notice = _notice(key, value)
                if notice is not None:
                    notify(notice)
            elif not etag or etag != before:
                # The server did not hold the query although nothing changed: do not spin.
                await anyio.sleep(self.retry_s)


def _notice(key: str, value: str) -> Notice | None:
    if key == "preempted" and value == "TRUE":
        return Notice("GCP preempts this machine", within_s=PREEMPTION_S)
    if key == "maintenance-event" and value == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("GCP host maintenance ends this machine", within_s=MAINTENANCE_S)
    return None
