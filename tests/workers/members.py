"""Starts, controls and ends processes of `group_member`, for tests.

Rule: every wait has a deadline, and the owner of a crew ends all its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.patience import DEADLINE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
FORGOTTEN = "gloo has forgotten a wait"
"""In what a process says that can be in no group any more; see `worker.group.group`."""


@dataclass(frozen=True)
class Answer:
    """A member's reply to one order; times are seconds of CLOCK_MONOTONIC."""

    value: Any
    error: str
    began: float
    ended: float

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1e3


class Template:
    """A process that has imported torch, and from which the members are forked.

    An import of torch takes each process seconds of processor.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.workers.group_member"],
                cwd=ROOT,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._forked: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, connection: socket.socket) -> Forked:
        """Fork a member that receives its orders over this connection."""
        socket.send_fds(self._control, [b"f"], [connection.fileno()])
        return self._forked.get(timeout=DEADLINE_S)

    def _read(self) -> None:
        members: dict[int, Forked] = {}
        with self._control.makefile() as lines:
            for line in lines:
                said = json.loads(line)
                if "code" in said:
                    members.pop(said["pid"]).code.set_result(said["code"])
                else:
                    one = members[said["pid"]] = Forked(said["pid"], Future())
                    self._forked.put(one)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self._control.close()


@dataclass(frozen=True)
class Forked:
    """A process that a template has forked; `code` is its exit code, -N for signal N."""

    pid: int
    code: Future[int]

    def poll(self) -> int | None:
        return self.code.result() if self.code.done() else None

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.code.result(timeout_s)

    def signal(self, number: int) -> None:
        if not self.code.done():
            os.kill(self.pid, number)


class MemberProcess:
    """One process and the orders that were sent to it."""

    def __init__(self, template: Template) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._orders, self._lines = ours.makefile("w"), ours.makefile("r")
            self.process = template.fork(theirs)
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {0: queue.SimpleQueue()}
        self._next = 1
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        for line in self._lines:
            said = json.loads(line)
            self._answers[said["id"]].put(
                Answer(said.get("value"), said.get("error", ""), said["began"], said["ended"])
            )

    def tell(self, order: str, **arguments: Any) -> int:
        """Send an order; return its number."""
        number, self._next = self._next, self._next + 1
        self._answers[number] = queue.SimpleQueue()
        line = json.dumps({"id": number, "do": order, "with": arguments})
        self._orders.write(line + "\n")
        self._orders.flush()
        return number

    def answer(self, number: int, patience_s: float = DEADLINE_S) -> Answer:
        """Wait for the reply to an order."""
        try:
            return self._answers[number].get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"pid {self.pid} has not answered order {number}") from None

    def is_done(self, number: int) -> bool:
        return not self._answers[number].empty()

    def ask(self, order: str, **arguments: Any) -> Any:
        """Send an order and return the value of its reply; an error fails the test."""
        said = self.answer(self.tell(order, **arguments))
        assert not said.error, f"{order}: {said.error}"
        return said.value

    def signal(self, number: int) -> None:
        self.process.signal(number)

    def kill(self) -> None:
        """Kill the process, stopped or not, and close its connection."""
        self.process.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(DEADLINE_S)
        self._lines.close()
        with contextlib.suppress(BrokenPipeError):  # What it was sent when it was dead already.
            self._orders.close()


class Crew:
    """Members that are reused between tests, since one process must survive many groups."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._members: list[MemberProcess] = []
        self._generation = 0

    def take(self, count: int) -> list[MemberProcess]:
        """Return members that reply and are in no group."""
        for one in [one for one in self._members if one.process.poll() is not None]:
            self.retire(one)  # It ended in a test that failed before it retired it.
        if self._template is None:
            self._template = Template()
        members: list[MemberProcess] = []
        while len(members) < count:
            if len(self._members) == len(members):
                self._members.append(MemberProcess(self._template))
            one = self._members[len(members)]
            if not one.is_done(0):
                one._answers[0].put(one.answer(0))
            said = one.answer(one.tell("drop"))
            if FORGOTTEN in said.error:
                self.retire(one)  # As an agent replaces a process that says so.
                continue
            assert not said.error, f"drop: {said.error}"
            members.append(one)
        return members

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def form(self, members: list[MemberProcess], **fields: Any) -> list[Answer]:
        """Form the next generation of these members; the first is the leader."""
        generation = self.next_generation()
        leader = members[0].ask("address")
        orders = [
            one.tell(
                "form",
                generation=generation,
                rank=rank,
                world_size=len(members),
                leader_address=leader,
                **fields,
            )
            for rank, one in enumerate(members)
        ]
        return [one.answer(order) for one, order in zip(members, orders, strict=True)]

    def retire(self, member: MemberProcess) -> None:
        """Kill one member and remove it."""
        self._members.remove(member)
        member.kill()

    def end(self) -> None:
        """Kill all members; `take` may start others later."""
        while self._members:
            self._members.pop().kill()
        if self._template is not None:
            self._template.end()
            self._template = None


def all_ask(members: list[MemberProcess], order: str, **arguments: Any) -> list[Any]:
    """Send all the same order at once, and return the values of their replies."""
    orders = [one.tell(order, **arguments) for one in members]
    answers = [one.answer(number) for one, number in zip(members, orders, strict=True)]
    assert not any(said.error for said in answers), [said.error for said in answers]
    return [said.value for said in answers]


def abort_all(members: list[MemberProcess], orders: list[int]) -> list[float]:
    """Abort on every member; return the ms from then until each left its blocked order."""
    aborts = [one.tell("abort") for one in members]
    freed = []
    for one, order, abort in zip(members, orders, aborts, strict=True):
        out, done = one.answer(order), one.answer(abort)
        assert out.error, "the blocked call came back without an error"
        freed.append((out.ended - done.began) * 1e3)
    return freed


def stop(member: MemberProcess) -> None:
    """Stop a member as a debugger or a stalled host does, and wait until it is stopped."""
    member.signal(signal.SIGSTOP)
    process = psutil.Process(member.pid)
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
