"""Scheduled events of an Azure machine, by its metadata service.

A spot machine is told of its eviction (`Preempt`) 30 seconds before at least; `Terminate`,
`Redeploy` and `Reboot` end what runs as well. `Freeze` does not: the machine stands still for a
moment. Events of a scale set name the machines that they concern.

Source: the documentation of Azure virtual machines, "Scheduled Events".
"""

from __future__ import annotations

import email.utils
import json
from dataclasses import dataclass
from typing import Any

import anyio

from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.source import Notice, Tell

ADDRESS = "169.254.169.254"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
POLL_S = 5.0
TIMEOUT_S = 10.0
"""The first question of a machine's life may take longer: it switches the events on."""
FATAL = ("Preempt", "Terminate", "Redeploy", "Reboot")
OK = 200


@dataclass(frozen=True)
class Azure:
    """Events that end this machine."""

    endpoint: MetadataEndpoint
    poll_s: float = POLL_S

    @property
    def name(self) -> str:
        """Return what --notices calls it."""
        return "azure"

    async def watch(self, tell: Tell) -> None:
        """Tell of each new notice, until cancelled."""
        said: set[str] = set()
        while True:
            events = _fatal(await self._get(EVENTS_PATH))
            # Events are rare, and a name that was once wrong must not stay so.
            machine = (await self._get(NAME_PATH)).strip() if events else ""
            for event_id, resources, notice in events:
                if machine in resources and event_id not in said:
                    said.add(event_id)
                    tell(notice)
            await anyio.sleep(self.poll_s)

    async def _get(self, path: str) -> str:
        """Return the text at a path, "" if there is none."""
        answer = await self.endpoint.ask(path, headers=HEADERS, timeout_s=TIMEOUT_S)
        return answer.text if answer is not None and answer.status == OK else ""


def _fatal(text: str) -> list[tuple[str, list[Any], Notice]]:
    """Read the events that end machines: id, names of the machines, and what to tell."""
    try:
        said: Any = json.loads(text or "null")
    except ValueError:
        return []
    events = said.get("Events") if isinstance(said, dict) else None
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
    """Read "Mon, 19 Sep 2016 18:29:47 GMT"; None when it has begun ("") or cannot be read."""
    try:
        return email.utils.parsedate_to_datetime(str(text)).timestamp()
    except (TypeError, ValueError):
        return None
