"""Fault injection into a running cluster: kill, stop, drain, start, also while it recovers.

Rule: a fault never waits for its effect; timers restart later what has to come back. `heal` undoes
all faults.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from elastic.core.facts import WorkerPhase
from elastic.core.view import JobView, WorkerView
from elastic.errors import ElasticError
from elastic.testing.local_cluster import LocalCluster, descendants, start_of

Item = TypeVar("Item")

AWAY_S_MAX = 3.0
"""Longest time in seconds for which a killed or stopped daemon stays away."""


class Breaker:
    """Injects faults into one cluster, which trains one job.

    Attributes:
        generation: the job's newest known generation.
    """

    def __init__(self, cluster: LocalCluster, job_id: str) -> None:
        """Watch the job, so that its workers are known also while the coordinator is down."""
        self._cluster = cluster
        self._job_id = job_id
        self._timers: list[threading.Timer] = []
        self._starting = threading.Lock()
        self._stopped: list[int] = []
        self._workers: dict[str, int] = {}
        self._pids: dict[int, str] = {}
        self._members: set[int] = set()
        self._leaving: set[int] = set()
        self.generation = 0
        threading.Thread(target=self._watch, name="chaos-watch", daemon=True).start()

    def strike(self, kind: str, draw: float) -> bool:
        """Inject one fault.

        Args:
            kind: name of a method here, without the underscore.
            draw: from 0 to 1; selects the victim.

        Returns:
            Whether there was a victim.
        """
        action: Callable[[float], bool] = getattr(self, f"_{kind}")
        return action(draw)

    def heal(self) -> None:
        """Restart agents and the coordinator, and continue stopped processes."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        self._start_coordinator()
        self._cluster.wait_nodes(self._cluster.num_nodes, restart=True)

    @property
    def size(self) -> int:
        """Return how many running workers have the run's state, as far as known.

        Counts members of the group that last did a step: a joining worker has no state before it.
        The processes are checked, since a coordinator that is down reports no lost workers.
        """
        here = self._members.intersection(self._living())
        return len(here.difference(self._stopped, self._leaving))

    def seen_processes(self) -> dict[int, str]:
        """Return the pids of all workers that were ever reported, with their start times.

        In a long run the kernel reuses pids for other processes.
        """
        return dict(self._pids)

    # ------------------------------------------------------------ workers

    def _kill_worker(self, draw: float) -> bool:
        return _signal(_one_of(self._living(), draw), signal.SIGKILL)

    def _kill_all_workers(self, _draw: float) -> bool:
        killed = [_signal(pid, signal.SIGKILL) for pid in self._living()]
        return any(killed)

    def _stop_worker(self, draw: float) -> bool:
        pid = _one_of(self._living(), draw)
        if pid:
            self._stopped.append(pid)
        return _signal(pid, signal.SIGSTOP)

    def _kill_spare(self, draw: float) -> bool:
        workers = self._living()
        below = [pid for name in self._up() for pid in descendants(self._pid_of(name))]
        return _signal(_one_of([p for p in below if p not in workers], draw), signal.SIGKILL)

    # ------------------------------------------------------------ agents and nodes

    def _kill_agent(self, draw: float) -> bool:
        name = _one_of(self._up(), draw)
        if not name:
            return False
        _signal(self._pid_of(name), signal.SIGKILL)
        self._cluster.agents[name].wait()
        self._later(draw * AWAY_S_MAX, partial(self._come_back, name))
        return True

    def _kill_all_agents(self, draw: float) -> bool:
        names = self._up()
        for name in names:
            _signal(self._pid_of(name), signal.SIGKILL)
        for name in names:
            self._cluster.agents[name].wait()
            self._later(draw * AWAY_S_MAX, partial(self._come_back, name))
        return bool(names)

    def _stop_agent(self, draw: float) -> bool:
        """Stop an agent; its workers keep training until the others' group is reformed."""
        name = _one_of(self._up(), draw)
        if not name:
            return False
        pid = self._pid_of(name)
        _signal(pid, signal.SIGSTOP)
        self._later(0.1 + draw * AWAY_S_MAX, partial(_signal, pid, signal.SIGCONT))
        self._stopped.append(pid)
        return True

    def _kill_node(self, draw: float) -> bool:
        name = _one_of(self._up(), draw)
        if not name:
            return False
        self._cluster.kill_node(name)
        return True

    def _start_node(self, draw: float) -> bool:
        name = _one_of([n for n in self._cluster.agents if n not in self._up()], draw)
        if name:
            self._come_back(name)
        return bool(name)

    def _drain(self, draw: float) -> bool:
        name = _one_of(self._up(), draw)
        if not name:
            return False
        self._leaving.update(descendants(self._pid_of(name)))
        return _signal(self._pid_of(name), signal.SIGTERM)

    def _come_back(self, name: str) -> None:
        if self._cluster.agents[name].poll() is not None:
            self._cluster.start_node(name)

    # ------------------------------------------------------------ the coordinator

    def _kill_coordinator(self, draw: float) -> bool:
        self._cluster.kill_coordinator()
        self._later(draw * AWAY_S_MAX, self._start_coordinator)
        return True

    def _start_coordinator(self) -> None:
        with self._starting:
            process = self._cluster.coordinator
            if process is None or process.poll() is not None:
                # It may be killed again while it starts; that fault's timer restarts it.
                with contextlib.suppress(ElasticError):
                    self._cluster.start_coordinator()

    # -------------------------------------------------------------- processes

    def _up(self) -> list[str]:
        return [name for name, agent in self._cluster.agents.items() if agent.poll() is None]

    def _pid_of(self, name: str) -> int:
        return self._cluster.agents[name].pid

    def _living(self) -> list[int]:
        """Return the pids of the job's workers whose processes exist."""
        below = {pid for name in self._up() for pid in descendants(self._pid_of(name))}
        return [pid for _, pid in sorted(self._workers.items()) if pid in below]

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _watch(self) -> None:
        with contextlib.suppress(ElasticError):
            for event in self._cluster.client.watch(self._job_id):
                if isinstance(event, JobView):
                    living = [w for w in event.workers if w.report.phase is not WorkerPhase.EXITED]
                    pids = {str(w.report.worker_id): w.report.pid for w in living if w.report.pid}
                    self.generation = event.record.generation
                    self._members = _having_stepped(living, self.generation) or self._members
                    self._workers = pids
                    self._pids.update({pid: start_of(pid) for pid in pids.values()})


def _having_stepped(workers: Sequence[WorkerView], generation: int) -> set[int]:
    """Return the pids of those that have done a step in this generation, so have the state."""
    return {
        w.report.pid
        for w in workers
        if w.report.phase is WorkerPhase.TRAINING and w.report.generation == generation and w.steps
    }


def _one_of(candidates: Sequence[Item], draw: float) -> Item | None:
    return candidates[int(draw * len(candidates))] if candidates else None


def _signal(pid: int | None, number: int) -> bool:
    if not pid:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
