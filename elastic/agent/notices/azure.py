"""Scheduled events of an Azure machine, by its metadata service.

A spot machine gets a notice of its eviction (`Preempt`) at least 30 seconds before; `Terminate`,
`Redeploy` and `Reboot` end its processes as well. `Freeze` does not: it only pauses the machine.
Events of a scale set name the machines that they concern.

Source: the documentation of Azure virtual machines, "Scheduled Events".
"""

from __future__ import annotations

import email.utils
import json
from dataclasses import dataclass
from typing import Any

import anyio

from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.source import Notice, Notify

ADDRESS = "169.254.169.254"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
POLL_S = 5.0
TIMEOUT_S = 10.0
"""Long, because the first query of a machine enables scheduled events there."""
FATAL = ("Preempt", "Terminate", "Redeploy", "Reboot")
OK = 200


@dataclass(frozen=True)
class Azure:
    """Scheduled events that end this machine."""

    name = "azure"
    endpoint: MetadataEndpoint
    poll_s: float = POLL_S

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with each new notice, until cancelled."""
        notified: set[str] = set()
        while True:
            events = _fatal(await self._get(EVENTS_PATH))
            # Queried for each event, not cached: events are rare, and a wrong name must not stay.
            machine = (await self._get(NAME_PATH)).strip() if events else ""
            for event_id, resources, notice in events:
                if machine in resources and event_id not in notified:
                    notified.add(event_id)
                    notify(notice)
            await anyio.sleep(self.poll_s)

    async def _get(self, path: str) -> str:
        """Return the text at a path, "" if there is none."""
        answer = await self.endpoint.request(path, headers=HEADERS, timeout_s=TIMEOUT_S)
        return answer.text if answer is not None and answer.status == OK else ""


def _fatal(text: str) -> list[tuple[str, list[Any], Notice]]:
    """Parse the events that end machines: id, names of the machines, and the notice."""
    try:
        document: Any = json.loads(text or "null")
    except ValueError:
        return []
    events = document.get("Events") if isinstance(document, dict) else None
    found = []
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or event.get("EventType") not in FATAL:
            continue
        resources = event.get("Resources")
        if isinstance(resources, list):
            notice = Notice(
                f"Azure scheduled event {event['EventType']}", _unix_s(event.get("NotBefore"))
            )
            found.append((str(event.get("EventId")), resources, notice))
    return found


def _unix_s(text: object) -> float | None:
    """Parse "Mon, 19 Sep 2016 18:29:47 GMT"; None if the event has begun ("") or is malformed."""
    try:
        return email.utils.parsedate_to_datetime(str(text)).timestamp()
    except (TypeError, ValueError):
        return None
