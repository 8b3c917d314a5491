"""The simulated coordinator's process: the real state machine with a simulated driver.

Rule: a host behaves as the real driver does (one event at a time, effects in order, `Persist` as a
barrier) and can die between any two effects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from elastic.core.config import CoordinatorConfig
from elastic.core.events import coordinator as events
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import SessionId
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.core.messages import (
    AgentMessage,
    Hello,
    Probe,
)
from elastic.core.view import ClusterView
from tests.simulation.disk import Disk
from tests.simulation.network import Network
from tests.simulation.terms import Candidate
from tests.simulation.world import MS, Alarm, S, Timeline

SUSPEND_NS = 1 * S
"""The driver detects a suspension of at least this length."""
WRITES = (events.Persist, events.PersistNodes)
OnStep = Callable[[int, Sequence[events.CoordinatorEffect], Callable[[], ClusterView], int], None]
"""Called after each step of the machine with its life, effects, a view of it, and the time."""
UNIX_NS = 1_700_000_000 * 1000 * MS
"""The wall clock at the start of a run."""


class CoordinatorHost:
    """The coordinator's process: may be down, slow, stopped, a standby, or between two effects.

    Attributes:
        name: name of the process.
        candidate: its part in leader election; None for a coordinator that is alone on its store.
        machine: the state machine of its term; None while it is down or a standby.
        doze_ns: for how long it is stopped after the next probe that it sends, 0 for not at all.
        stepped_ns: time of its machine's last step; the effects may be performed much later.
    """

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        disk: Disk,
        config: CoordinatorConfig,
        *,
        candidate: Candidate | None = None,
    ) -> None:
        """Create a process that is down; `start` starts it."""
        self.timeline = timeline
        self.network = network
        self.disk = disk
        self.config = config
        self.candidate = candidate
        self.name = candidate.name if candidate is not None else "coordinator"
        if candidate is not None:
            candidate.lead, candidate.stop = self._lead, self.step_down
        self.is_up = False
        self.disk_delay_max_ns = 5 * MS
        self.machine: CoordinatorMachine | None = None
        self.life = 0
        self.replies: dict[str, events.Reply] = {}
        self.on_note: Callable[[Note], None] = lambda note: None
        self.on_step: OnStep = lambda life, effects, look, now_ns: None
        self.is_frozen = False
        self.doze_ns = 0
        self.stepped_ns = 0
        self._frozen_ns = 0
        self._unread: list[events.CoordinatorEvent] = []
        self._inbox: deque[events.CoordinatorEvent] = deque()
        self._effects: deque[events.CoordinatorEffect] = deque()
        self._is_busy = False
        self._alarm = Alarm(timeline, lambda: self.post(Tick()))

    def start(self) -> None:
        """Start a new process: it leads with the state on disk, or waits for the lease."""
        if self.is_up:
            return
        self.is_up, self.is_frozen = True, False
        if self.candidate is not None:
            self.candidate.begin()
        else:
            self._lead()

    def _lead(self) -> None:
        """Start a term as the leader."""
        self.life = self.candidate.term if self.candidate is not None else self.life + 1
        self.machine = CoordinatorMachine(self.config, f"{self.name}-{self.life}")
        self._inbox.clear()
        self._unread.clear()
        self._effects.clear()
        self._is_busy = False
        self._alarm.reset()
        self.timeline.tell(self.name, f"starts, life {self.life}")
        records = tuple(self.disk.records.values())
        unix_ns = UNIX_NS + self.timeline.now_ns
        nodes = self.disk.nodes
        self.post(events.Recovered(records, self.life, "one store", nodes, unix_ns=unix_ns))

    def may_act(self) -> bool:
        """Return whether it is the only possible leader, as far as this process knows."""
        return self.candidate is None or self.candidate.is_valid()

    def step_down(self) -> None:
        """End the term: close all streams and become a standby again."""
        if self.machine is None or self.candidate is None:
            return
        self.machine = None
        self.timeline.tell(self.name, f"leads no more, life {self.life}")
        self.network.coordinator_died(self.name)
        self.candidate.over()

    def crash(self) -> None:
        """End the process, between two effects or in the middle of a write."""
        if not self.is_up:
            return
        effect = self._effects[0] if self.machine is not None and self._effects else None
        if isinstance(effect, WRITES) and self.timeline.chance(0.5):
            self._write(effect)
        self.machine = None
        self.is_up = False
        if self.candidate is not None:
            self.candidate.end()
        self.timeline.tell(self.name, "crashes")
        self.network.coordinator_died(self.name)

    def post(self, event: events.CoordinatorEvent) -> None:
        """Put an event into the driver's queue."""
        if self.machine is None:
            return
        if self.is_frozen and not isinstance(event, Tick):
            self._unread.append(event)
            return
        self._inbox.append(event)
        self._pump()

    def freeze(self, frozen: bool, paused_ns: int = 0) -> None:
        """Simulate SIGSTOP or SIGCONT of the coordinator.

        Its clock continues: on SIGCONT, its deadline is over before it has read its messages.

        Args:
            frozen: whether it stops now.
            paused_ns: for how long its clock was paused too, as that of a paused machine is.
        """
        if not self.is_up or frozen == self.is_frozen:
            return
        slept_ns = self.timeline.now_ns - self._frozen_ns - paused_ns
        self.is_frozen, self._frozen_ns = frozen, self.timeline.now_ns
        if self.candidate is not None:
            self.candidate.freeze(frozen, paused_ns)
        self.timeline.tell(self.name, "frozen" if frozen else "thaws")
        if not frozen:
            self._inbox.extend(self._unread)
            self._unread.clear()
            if slept_ns >= SUSPEND_NS and self.machine is not None:
                self._inbox.append(events.WokeFromSuspend(slept_ns))
            self._pump()

    def receives(self, session: SessionId, message: AgentMessage) -> None:
        """Receive a message over a stream."""
        if isinstance(message, Hello):
            self.post(events.AgentConnected(session, message))
        else:
            self.post(events.AgentMessageReceived(session, message))

    def loses(self, session: SessionId, reason: str) -> None:
        """Handle the end of a stream."""
        self.post(events.AgentDisconnected(session, reason))

    def _pump(self) -> None:
        while self.machine is not None and not self._is_busy and not self.is_frozen:
            if not self.may_act():
                self.step_down()
            elif self._effects:
                self._perform(self._effects[0])
            elif self._inbox:
                # As in the driver: all events that are queued by now are one step.
                waiting = tuple(self._inbox)
                self._inbox.clear()
                event = events.EventBatch(waiting) if len(waiting) > 1 else waiting[0]
                self.stepped_ns = self.timeline.now_ns
                effects = self.machine.step(event, self.stepped_ns)
                look = partial(self.machine.view, self.stepped_ns)
                self.on_step(self.life, effects, look, self.stepped_ns)
                self._effects.extend(effects)
            else:
                self._arm()
                return

    def _perform(self, effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, WRITES):
            self._is_busy = True
            life = self.life
            delay = self.timeline.between(MS // 2, self.disk_delay_max_ns)
            self.timeline.after(delay, self._written, life)
            return
        self._effects.popleft()
        if isinstance(effect, events.SendAgent):
            if self.candidate is not None:
                self.candidate.command()
            self.network.send_down(effect.session, effect.message)
            if self.doze_ns and isinstance(effect.message, Probe):
                self.freeze(True)
                self.timeline.after(self.doze_ns, self.freeze, False)
                self.doze_ns = 0
        elif isinstance(effect, events.CloseSession):
            self.network.close_from_coordinator(effect.session)
        elif isinstance(effect, events.Reply):
            self.replies[effect.request_id] = effect
        elif isinstance(effect, events.Forget):
            if self.candidate is None or self.candidate.write(self.life):
                for job_id in effect.job_ids:
                    self.disk.records.pop(job_id, None)
        elif isinstance(effect, Note):
            fields = " ".join(f"{name}={value}" for name, value in effect.fields)
            self.timeline.tell(self.name, f"{effect.name} {effect.job_id} {fields}")
            self.on_note(effect)

    def _written(self, life: int) -> None:
        if self.machine is None or life != self.life:
            return
        if self.candidate is not None and not self.candidate.reaches_store():
            self.timeline.after(200 * MS, self._written, life)
            return
        effect = self._effects.popleft()
        if isinstance(effect, WRITES) and not self._write(effect):
            self.step_down()
            return
        self._is_busy = False
        self._pump()

    def _write(self, effect: events.Persist | events.PersistNodes) -> bool:
        """Write, unless the store is unreachable or another coordinator leads by now."""
        if self.candidate is not None and not self.candidate.write(self.life):
            return False
        if isinstance(effect, events.Persist):
            self.disk.write(effect.records)
        else:
            self.disk.nodes = effect.record
        return True

    def _arm(self) -> None:
        """Set the alarm to the machine's next deadline."""
        self._alarm.set(self.machine.next_deadline_ns() if self.machine else None)
