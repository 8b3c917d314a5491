"""The agent's stream to the coordinator: attempts, sessions, and the reports that wait for it.

Rule: a worker never waits for the connection. What must not be lost is kept here until the
coordinator acknowledges it; all else is in the next `Hello`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from elastic.core.config import AgentConfig, ns
from elastic.core.events.agent import AgentEffect, Connect, Disconnect, SendCoordinator
from elastic.core.facts import Generation, Node, ReportKind, SessionId, WorkerId
from elastic.core.machine.event_history import note
from elastic.core.machine.transitions import CONNECTION, ConnectionPhase, check_move
from elastic.core.messages import (
    AgentMessage,
    Hello,
    Report,
    ReportAck,
    Reported,
    Welcome,
    is_metrics,
)

REPORTS_KEPT_MAX = 20_000
"""Unacknowledged reports that are kept; beyond it the oldest without a checkpoint is dropped."""
DOUBLINGS_MAX = 40

ReportKey = tuple[WorkerId, Generation, ReportKind, int]


def _key(one: Report | ReportAck) -> ReportKey:
    """Return the key that a report and its acknowledgement share."""
    return one.worker_id, one.generation, one.kind, one.index


class Connection:
    """One stream at a time, retried for ever with growing, jittered pauses.

    Attributes:
        phase: see `transitions.CONNECTION`.
        session: the newest attempt; messages over another one are stale.
    """

    def __init__(self, node: Node, config: AgentConfig, out: list[AgentEffect]) -> None:
        """Begin disconnected, with the first attempt due at once; effects go to `out`."""
        self.phase = ConnectionPhase.DISCONNECTED
        self.session = SessionId("")
        self._node = node
        self._out = out
        self._pause_min_ns = ns(config.reconnect_delay_s_min)
        self._pause_max_ns = ns(config.reconnect_delay_s_max)
        self._retry_at_ns: int | None = 0
        self._attempts = 0
        self._num_sessions = 0
        # The latest term that registered us: earlier ones of the same store are over.
        self._history = ""
        self._term = 0
        # The driver draws jitter, but a refusal brings none: nodes differ by name at least.
        self._jitter = zlib.crc32(node.node_id.encode()) / 2**32

    def is_registered(self) -> bool:
        """Return whether the coordinator has registered this node over the open stream."""
        return self.phase is ConnectionPhase.REGISTERED

    def is_current(self, session: SessionId) -> bool:
        return session == self.session and self.phase is not ConnectionPhase.DISCONNECTED

    def turn(self, now_ns: int) -> None:
        """Try to connect if that is due."""
        if self._retry_at_ns is None or now_ns < self._retry_at_ns:
            return
        self._retry_at_ns = None
        self._num_sessions += 1
        session = f"{self._node.node_id}/{self._node.incarnation}/{self._num_sessions}"
        self.session = SessionId(session)
        self._move(ConnectionPhase.CONNECTING)
        self._out.append(Connect(self.session))

    def greet(self, hello: Hello) -> None:
        """Send Hello over the opened stream."""
        self._move(ConnectionPhase.GREETED)
        self.send(hello)

    def welcomed(self, welcome: Welcome, now_ns: int) -> bool:
        """Handle `Welcome`, and reset the back-off.

        Returns:
            False, and the stream is dropped, if a later leader has registered us before: this one
            was frozen or cut off, and does not know yet that it was replaced.
        """
        if welcome.history == self._history and welcome.term < self._term:
            reason = (
                f"coordinator {welcome.coordinator} leads under term {welcome.term}, and term "
                f"{self._term} has begun: it was replaced"
            )
            self.refused(reason, now_ns, final=False)
            return False
        self._history, self._term = welcome.history, welcome.term
        self._move(ConnectionPhase.REGISTERED)
        self._attempts = 0
        fields = {"coordinator": welcome.coordinator, "session": self.session}
        self._out.append(note("connected", **fields, term=welcome.term))
        return True

    def lost(self, reason: str, jitter: float, now_ns: int) -> None:
        """Handle the end of a stream, or a failed attempt: retry after a pause."""
        self._jitter = min(1.0, max(0.0, jitter))
        if self.phase is not ConnectionPhase.CONNECTING:
            self._out.append(note("connection_lost", session=self.session, reason=reason))
        elif self._attempts == 0:
            self._out.append(note("coordinator_unreachable", reason=reason))
        self._pause(now_ns)

    def refused(self, reason: str, now_ns: int, *, final: bool) -> None:
        """Handle a refusal: drop the stream, and retry unless it is final."""
        self._out.append(note("registration_refused", reason=reason, final=final))
        self._out.append(Disconnect(self.session))
        self._pause(now_ns)
        if final:
            self._retry_at_ns = None

    def send(self, message: AgentMessage) -> None:
        self._out.append(SendCoordinator(self.session, message))

    def next_deadline_ns(self) -> int | None:
        """Return when the next attempt is due."""
        return self._retry_at_ns

    def _pause(self, now_ns: int) -> None:
        """Wait between min and min * 2^n, at most max: full jitter, so that no herd forms."""
        self._move(ConnectionPhase.DISCONNECTED)
        self._attempts = min(self._attempts + 1, DOUBLINGS_MAX)
        most_ns = min(self._pause_max_ns, self._pause_min_ns << self._attempts)
        spread_ns = round(self._jitter * (most_ns - self._pause_min_ns))
        self._retry_at_ns = now_ns + self._pause_min_ns + spread_ns

    def _move(self, phase: ConnectionPhase) -> None:
        check_move(CONNECTION, f"session {self.session or '(none)'}", self.phase, phase)
        self.phase = phase


class UnacknowledgedReports:
    """Reports of workers that the coordinator has not answered yet, oldest first.

    A train function may report for hours while the coordinator is away; reports with a
    checkpoint wait for their acknowledgement, so only the others can accumulate.

    Acknowledged metrics without a checkpoint are in the coordinator's memory only, not in a store:
    the newest ones are resent with every connection, as it may be to another coordinator.
    """

    def __init__(self, out: list[AgentEffect], limit: int = REPORTS_KEPT_MAX) -> None:
        """Keep at most `limit` reports (more only if all of them carry checkpoints)."""
        self._kept: dict[ReportKey, Reported] = {}
        self._newest: dict[WorkerId, Reported] = {}
        self._again: set[ReportKey] = set()
        self._limit = limit
        self._out = out

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, reported: Reported) -> bool:
        """Keep a report; return False if it was known already."""
        report = reported.report
        key = _key(report)
        if key in self._kept:
            return False
        self._kept[key] = reported
        if len(self._kept) > self._limit:
            self._drop_oldest()
        return True

    def ack(self, ack: ReportAck) -> None:
        """Drop an acknowledged report; keep the newest metrics for the next connection."""
        reported = self._kept.pop(_key(ack), None)
        if reported is None or not ack.accepted or not is_metrics(reported.report):
            return
        if reported.report.checkpoint:
            self.forget(ack.worker_id)  # They are durable.
        else:
            self._newest[ack.worker_id] = reported

    def forget(self, worker_id: WorkerId) -> None:
        """Drop this worker's newest metrics: they need not be resent any more."""
        self._newest.pop(worker_id, None)

    def reconnect(self, generations: Mapping[WorkerId, Generation]) -> None:
        """Mark metrics that a new coordinator may not know as unacknowledged again.

        Args:
            generations: of our workers; reports of earlier ones are obsolete.
        """
        again: dict[ReportKey, Reported] = {}
        newer = {key[0] for key, one in self._kept.items() if is_metrics(one.report)}
        for worker_id, reported in self._newest.items():
            report = reported.report
            if generations.get(worker_id) == report.generation and worker_id not in newer:
                again[_key(report)] = reported
        self._again = {*again} | (self._again & {*self._kept})
        self._kept, self._newest = again | self._kept, {}

    def are_received(self) -> bool:
        """Return whether a coordinator, perhaps an earlier one, has acknowledged all of them."""
        return {*self._kept} <= self._again

    def all(self) -> tuple[Reported, ...]:
        """Return what must be sent again, in the order in which it came."""
        return tuple(self._kept.values())

    def has_any_of(self, worker_id: WorkerId, generation: Generation) -> bool:
        return any(key[:2] == (worker_id, generation) for key in self._kept)

    def _drop_oldest(self) -> None:
        for key, reported in self._kept.items():
            if not reported.report.checkpoint:
                del self._kept[key]
                report = reported.report
                dropped = note(
                    "report_dropped",
                    report.job_id,
                    worker=report.worker_id,
                    generation=report.generation,
                    index=report.index,
                )
                self._out.append(dropped)
                return
