"""Strikes that a seed draws, on a network of our own, while one job trains.

    unshare --net python -m tests.chaos.net.strikes DIRECTORY --seed 7 --strikes 30

Agents, nodes and workers stand still, links are silent or slow, coordinators and members of the
store are killed or stand still, and the job is paused while a node is cut off; half of it within
300 ms of the strike before. After each round all is healed, and the full group must train again.
In the end the state after every step of every rank must be that of a run that nobody disturbed.

Prints a JSON line for each round and one for the end. A seed draws what is done, to whom and when;
what the machine makes of it differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from elastic.core.facts import ENDED
from elastic.errors import ElasticError
from elastic.testing.local_cluster import descendants
from tests.chaos.net.cluster import COORDINATORS, MEMBERS, NetCluster
from tests.chaos.net.play import Play, finish, tell
from tests.chaos.net.switch import CUT, Link
from tests.harness.chaos_jobs import chaos_job, with_arguments
from tests.harness.traces import end_references

AGENTS = ("n1", "n2", "n3")
ROUND = 10
"""Strikes after which all is healed."""
BURST_S = 0.3
EVERY_S = 2.0
"""Mean time between two bursts."""
STEPS_SAVED = 20
WEIGHTS = {
    "stop_agent": 3.0,
    "stop_node": 2.0,
    "stop_worker": 2.0,
    "silence_node": 2.0,
    "silence_agent": 2.0,
    "silence_one_way": 1.0,
    "cut_workers": 2.0,
    "slow_links": 2.0,
    "kill_coordinator": 3.0,
    "stop_coordinator": 1.0,
    "part_coordinator": 1.0,
    "kill_member": 2.0,
    "stop_members": 1.0,
    "pause": 2.0,
}
"""How often each is drawn."""


class Striker:
    """Strikes a cluster that trains; nothing here waits for what a strike does.

    Attributes:
        done: the strikes that found a victim, by kind.
        spans: from when to when each of them lasted, seconds since 1970.
    """

    def __init__(self, play: Play, seed: int) -> None:
        self._play = play
        self._cluster = play.cluster
        self._rng = random.Random(seed)
        self._lock, self._starts = threading.RLock(), threading.Lock()
        self._links: list[list[tuple[str, str, Link, bool]]] = []
        self._undo: dict[int, Callable[[], None]] = {}
        self._timers: list[threading.Timer] = []
        self._calls: list[threading.Thread] = []
        self._pids: list[int] = []
        self.done: list[str] = []
        self.spans: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def strike(self) -> None:
        """Wait for as long as is drawn, and strike."""
        rng = self._rng
        wait_s = rng.uniform(0, BURST_S) if rng.random() < 0.5 else rng.expovariate(1 / EVERY_S)
        time.sleep(min(wait_s, 4 * EVERY_S))
        kind = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        action: Callable[[], str] = getattr(self, f"_{kind}")
        if victim := action():
            self.done.append(kind)
            print(f"{time.time():.3f} {kind} {victim}", file=sys.stderr, flush=True)

    def heal(self) -> None:
        """Let everything come back at once."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        self._timers.clear()
        for number in [*self._undo]:
            self._end(number)
        for call in self._calls:
            call.join()
        self._calls.clear()

    # ------------------------------------------------------------ what stands still

    def _stop_agent(self) -> str:
        name = self._rng.choice(AGENTS)
        return self._stop([self._cluster.processes[name].pid], self._between(1, 3), name)

    def _stop_node(self) -> str:
        name = self._rng.choice(AGENTS)
        pid = self._cluster.processes[name].pid
        return self._stop([pid, *descendants(pid)], self._between(1, 3), name)

    def _stop_worker(self) -> str:
        lasts_s, draw = self._between(0.2, 3), self._rng.random()
        below = {pid for name in AGENTS for pid in descendants(self._cluster.processes[name].pid)}
        pids = [pid for pid in self._pids if pid in below]
        return self._stop([pids[int(draw * len(pids))]], lasts_s, "worker") if pids else ""

    def _stop_coordinator(self) -> str:
        name = self._rng.choice(COORDINATORS)
        return self._stop([self._cluster.processes[name].pid], self._between(0.2, 8), name)

    def _stop_members(self) -> str:
        """One of the store's, or so many that it has no quorum."""
        names = self._rng.sample(MEMBERS, self._rng.choice((1, 2)))
        pids = [self._cluster.processes[name].pid for name in names]
        return self._stop(pids, self._between(0.5, 5), "+".join(names))

    def _stop(self, pids: list[int], lasts_s: float, what: str) -> str:
        for pid in pids:
            send(pid, signal.SIGSTOP)

        def wake() -> None:
            # The agent is the first, and the last to wake: it must not see its workers stopped.
            for pid in reversed(pids):
                send(pid, signal.SIGCONT)

        return self._begin(wake, lasts_s, f"{what} pids={pids[:1]}")

    # ------------------------------------------------------------ links

    def _silence_node(self) -> str:
        """A node hears nobody and nobody hears it."""
        name = self._rng.choice(AGENTS)
        return self._set([(name, "*", CUT, False)], self._between(0.2, 6), name)

    def _silence_agent(self) -> str:
        """A node reaches its peers, and no coordinator."""
        name = self._rng.choice(AGENTS)
        links = [(name, coordinator, CUT, False) for coordinator in COORDINATORS]
        return self._set(links, self._between(0.2, 6), name)

    def _silence_one_way(self) -> str:
        name = self._rng.choice(AGENTS)
        pairs = [(name, one) for one in COORDINATORS]
        if self._rng.random() < 0.5:
            pairs = [(one, name) for name, one in pairs]
        links = [(*pair, CUT, True) for pair in pairs]
        return self._set(links, self._between(0.2, 6), f"{pairs[0][0]}->{pairs[0][1]}")

    def _cut_workers(self) -> str:
        one, other = self._rng.sample(AGENTS, 2)
        is_one_way = self._rng.random() < 0.3
        return self._set([(one, other, CUT, is_one_way)], self._between(0.2, 6), f"{one}-{other}")

    def _slow_links(self) -> str:
        names = self._rng.sample((*AGENTS, *COORDINATORS, *MEMBERS), self._rng.randint(1, 4))
        link = Link(loss=self._between(0, 0.03), delay_s=self._between(0.005, 0.1))
        links = [(name, "*", link, False) for name in names]
        return self._set(links, self._between(1, 5), "+".join(names))

    def _part_coordinator(self) -> str:
        """A coordinator is cut off from the store, and perhaps from all agents, too."""
        name = self._rng.choice(COORDINATORS)
        others = [*MEMBERS, *(AGENTS if self._rng.random() < 0.5 else ())]
        links = [(name, other, CUT, False) for other in others]
        return self._set(links, self._between(0.5, 6), f"{name} from {'+'.join(others)}")

    def _set(self, links: list[tuple[str, str, Link, bool]], lasts_s: float, what: str) -> str:
        with self._lock:
            self._links.append(links)
            self._set_all()

        def mend() -> None:
            with self._lock:
                self._links.remove(links)
                self._set_all()

        return self._begin(mend, lasts_s, what)

    def _set_all(self) -> None:
        self._cluster.switch.heal()
        for links in self._links:
            for one, other, link, is_one_way in links:
                self._cluster.switch.set(one, other, link, one_way=is_one_way)

    # ------------------------------------------------------------ who is killed

    def _kill_coordinator(self) -> str:
        names = [self._rng.choice(COORDINATORS)] if self._rng.random() < 0.8 else [*COORDINATORS]
        return self._kill(names, self._cluster.start_coordinator)

    def _kill_member(self) -> str:
        """Of the store: mostly one, or so many that it has no quorum."""
        names = self._rng.sample(MEMBERS, 1 if self._rng.random() < 0.7 else 2)
        return self._kill(names, self._cluster.start_member)

    def _kill(self, names: list[str], start: Callable[[str], None]) -> str:
        lasts_s = self._between(0, 4)
        for name in names:
            self._cluster.kill(name)

        def come_back() -> None:
            for name in names:
                with self._starts:  # It may have been killed twice.
                    if self._cluster.processes[name].poll() is not None:
                        start(name)

        return self._begin(come_back, lasts_s, "+".join(names))

    # ------------------------------------------------------------ pauses

    def _pause(self) -> str:
        """The job is paused while a node is cut off, and goes on before or after that is over."""
        victim = self._silence_agent()
        if self._rng.random() < 0.5:
            victim = f"{victim} {self._stop_worker()}"

        client = self._cluster.client
        self._call(client.pause)
        return self._begin(lambda: self._call(client.resume), self._between(0.5, 6), victim)

    def _call(self, action: Callable[[str], None]) -> None:
        """Ask for something, which nobody may answer."""

        def call() -> None:
            with contextlib.suppress(ElasticError):
                action(self._play.job_id)

        self._calls.append(threading.Thread(target=call, daemon=True))
        self._calls[-1].start()

    # ------------------------------------------------------------ what begins, and ends

    def _begin(self, undo: Callable[[], None], lasts_s: float, what: str) -> str:
        with self._lock:
            number = len(self.spans)
            self._undo[number] = undo
            self.spans.append((time.time(), float("inf")))
        timer = threading.Timer(lasts_s, self._end, (number,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
        return f"{what} for {lasts_s:.1f} s"

    def _end(self, number: int) -> None:
        with self._lock:
            undo = self._undo.pop(number, None)
        if undo is not None:
            undo()
            self.spans[number] = (self.spans[number][0], time.time())

    def _watch(self) -> None:
        """Keep whom there is to stop, as far as somebody tells."""
        while True:
            with contextlib.suppress(ElasticError):
                self._pids = self._play.pids()
            time.sleep(0.5)

    def _between(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)


def send(pid: int, number: int) -> None:
    """Send a signal to who may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---------------------------------------------------------------- what must hold


def settle(play: Play, striker: Striker) -> None:
    """Heal all, and wait until the full group trains."""
    striker.heal()
    cluster = play.cluster

    def resumed() -> bool:
        cluster.client.resume(play.job_id)
        return True

    cluster.wait_until(resumed, "somebody who resumes the job")
    play.wait_trains()
    gone = [name for name in cluster.agents if cluster.processes[name].poll() is not None]
    assert not gone, f"the agents {gone} have ended"
    view = play.view()
    assert view.record.phase not in ENDED, (view.reason, view.record.failure)


def end(play: Play) -> None:
    """Let the job end right; nobody may have met a bug of its own."""
    finish(play)
    logs = play.cluster.directory.glob("*.log")
    workers = (play.cluster.directory / "logs").rglob("*.log")
    for path in [*logs, *workers]:
        text = path.read_text(errors="replace")
        is_coordinator = path.stem in COORDINATORS
        if "InvariantViolation" in text or (is_coordinator and "Traceback" in text):
            where = max(text.find("Traceback"), 0)
            raise AssertionError(f"{path} shows a bug: {text[where:][:4000]}")


def gaps(play: Play, striker: Striker, first_s: float) -> tuple[float, float]:
    """Return the longest time without a step, and the longest of that while nothing was broken."""
    ends = sorted(
        float(line)
        for path in play.times.parent.glob(f"{play.times.name}.*")
        for line in path.read_text().split("\n")[:-1]
    )
    pairs = [(before, after) for before, after in pairwise(ends) if before > first_s]
    longest = max((after - before for before, after in pairs), default=0.0)
    unbroken = max((unbroken_s(*pair, striker.spans) for pair in pairs), default=0.0)
    return longest, unbroken


def unbroken_s(first_s: float, last_s: float, spans: list[tuple[float, float]]) -> float:
    """Return how long nothing was broken at the end of this time."""
    over = [end for begin, end in spans if begin < last_s and end > first_s]
    return max(0.0, last_s - max(over, default=first_s))


def main() -> None:
    """Strike, and say how it ended; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strikes", type=int, default=30)
    args = parser.parse_args()
    with (
        NetCluster(args.directory, agents=AGENTS, spares=1) as cluster,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(end_references)
        job = chaos_job(
            "steps", "struck", workers=len(AGENTS), directory=args.directory,
            save_every=STEPS_SAVED,
        )  # fmt: skip
        times = args.directory / "times"
        job = with_arguments(job, "--model", "cnn", "--scaler")
        entry = replace(job.spec.entry, args=(*job.spec.entry.args, "--times", str(times)))
        play = Play(cluster, replace(job, spec=replace(job.spec, entry=entry)), times)
        play.wait_trains()
        striker = Striker(play, args.seed)
        is_right, number = True, 0
        while is_right and len(striker.done) < args.strikes:
            number += 1
            is_right = tell(f"round {number}", play, lambda play: strike_round(play, striker))
        is_right = tell("finish", play, end) and is_right
        print(json.dumps({"seed": args.seed, "strikes": Counter(striker.done)}), flush=True)
    sys.exit(0 if is_right else 1)


def strike_round(play: Play, striker: Striker) -> None:
    """Strike some times, and see that all train again."""
    began_s = time.time()
    for _ in range(ROUND):
        striker.strike()
    settle(play, striker)
    play.seen["gap_s"], play.seen["unbroken_gap_s"] = gaps(play, striker, began_s)


if __name__ == "__main__":
    main()
