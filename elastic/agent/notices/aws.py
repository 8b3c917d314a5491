"""Spot interruption notices of AWS, by the instance metadata service, version 2.

A spot instance gets a notice two minutes before it is stopped or terminated. A recommendation to
rebalance comes earlier, when an interruption has become likely, and names no time. It is a separate
source, because it is advice: with `--notices aws,aws-rebalance` the node leaves at once, with `aws`
alone it waits for the notice.

Source: the user guide of Amazon EC2, "Spot Instance interruption notices" and "Instance metadata".
"""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass, field

import anyio

from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.source import Notice, Notify

ADDRESS = "169.254.169.254"
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_LIFE_S = 21600
POLL_S = 5.0
"""The interval that AWS recommends."""
OK, UNAUTHORISED = 200, (401, 403)


@dataclass
class _Session:
    """A session token and when it must be renewed; requested only when a query needs it."""

    endpoint: MetadataEndpoint
    token: str = ""
    renew_at_s: float = 0.0

    async def get(self, path: str) -> str | None:
        """Return the text at a path, None if there is none, or no reply."""
        if not self.token or time.monotonic() >= self.renew_at_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            answer = await self.endpoint.request(TOKEN_PATH, method="PUT", headers=headers)
            if answer is None or answer.status != OK or not answer.text.isascii():
                return None
            self.token = "".join(answer.text.split())[:4096]
            self.renew_at_s = time.monotonic() + TOKEN_LIFE_S / 2
        answer = await self.endpoint.request(path, headers={"X-aws-ec2-metadata-token": self.token})
        if answer is not None and answer.status in UNAUTHORISED:
            self.token = ""
        return answer.text if answer is not None and answer.status == OK else None


@dataclass(frozen=True)
class Aws:
    """Interruptions of a spot instance.

    Attributes:
        is_rebalance: watch for the recommendation to rebalance instead.
        poll_s: between two queries.
    """

    endpoint: MetadataEndpoint
    is_rebalance: bool = False
    poll_s: float = POLL_S
    _reported: set[str] = field(default_factory=set, repr=False)

    @property
    def name(self) -> str:
        return "aws-rebalance" if self.is_rebalance else "aws"

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with each new notice, until cancelled."""
        session = _Session(self.endpoint)
        path = REBALANCE_PATH if self.is_rebalance else ACTION_PATH
        while True:
            text = await session.get(path)
            notice = _rebalance(text) if self.is_rebalance else _action(text)
            if text and notice and text not in self._reported:
                self._reported.add(text)
                notify(notice)
            await anyio.sleep(self.poll_s)


def _action(text: str | None) -> Notice | None:
    """Parse {"action": "terminate", "time": "2017-09-18T08:22:00Z"}; None for anything else."""
    fields = _object(text)
    action, moment = fields.get("action"), _unix_s(fields.get("time"))
    if action not in ("terminate", "stop", "hibernate") or moment is None:
        return None
    return Notice(f"AWS spot instance-action {action}", deadline_unix_s=moment)


def _rebalance(text: str | None) -> Notice | None:
    """Parse {"noticeTime": "2020-10-27T08:22:00Z"}; None for anything else."""
    if _unix_s(_object(text).get("noticeTime")) is None:
        return None
    return Notice("AWS rebalance recommendation")


def _object(text: str | None) -> dict[str, object]:
    try:
        fields = json.loads(text or "null")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _unix_s(text: object) -> float | None:
    """Parse a time such as 2017-09-18T08:22:00Z; without a time zone it is UTC."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp()
