"""The agent's side of its zygote: the process that has imported torch, and forks spares.

Rule: a zygote that fails is no failure of the node. Whoever asked is told that it is gone, and
starts spares the slow way from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.agent.kernel import process_state
from elastic.core.world import Entry

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
BORN = struct.Struct("<qq")
"""An answer: the number that was asked for, and the pid, or minus an error's number."""
FIRST_BIRTH_S_MAX = 300.0
"""A zygote that has not answered by then is stuck. One that imports torch on a slow disk or a busy
machine is not, and if it were given up, each worker would import torch beside all the others."""
BIRTH_S_MAX = 5.0
"""The same for one that has answered before."""
IMPORTS_S_MAX = 300.0
"""More than that for the first process of a script, whose imports it makes; it gives up sooner."""
SCRIPT_BYTES_MAX = 32_000
"""Of what is told of a script, with its environment."""


@dataclass(frozen=True)
class SpareRequest:
    """A spare that is asked for.

    Attributes:
        number: of it.
        job_id: what its script belongs to.
        script: JSON of the script whose imports it is to have made, "" for none.
    """

    number: int
    job_id: str = ""
    script: str = ""

    @classmethod
    def of(cls, number: int, job_id: str, entry: Entry | None) -> SpareRequest:
        """Return what is to be told of a spare; what is too much for a message is left out."""
        if entry is None:
            return cls(number)
        folders = [entry.working_dir, *entry.python_path]
        told = {"path": entry.target, "folders": folders, "env": dict(entry.env)}
        text = json.dumps(told)
        return cls(number, job_id, text) if len(text) <= SCRIPT_BYTES_MAX else cls(number)

    def text(self) -> bytes:
        """Return it as the zygote reads it: number, job and script, a space between each."""
        return f"{self.number} {self.job_id} {self.script}".encode()


def adopt_orphans() -> None:
    """Become the parent of what our children leave behind.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def reap_adopted(known: Callable[[int], bool]) -> None:
    """Let go of dead processes that we adopted, and that nobody waits for.

    Args:
        known: whether somebody waits for a pid.
    """
    for pid in _children():
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            # What is in our own session was not adopted from a worker's.
            if not known(pid) and process_state(pid) == "Z" and os.getsid(pid) != os.getsid(0):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # A kernel without that list.
        return []


class Zygote:
    """One zygote, from its start to its end; lives on the agent's event loop."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        born: Callable[[int, int], None],
        gone: Callable[[], None],
    ) -> None:
        """Start it.

        Args:
            command: `--socket-fd N` is appended.
            env: its whole environment, and that of what it forks.
            output: where it prints; its streams are those of what it forks, which prints to pipes.
            born: called with the number that was asked for, and the pid (below 0: none).
            gone: called once if it ends by itself; nothing more is born.

        Raises:
            OSError: it cannot be started.
        """
        adopt_orphans()
        self._born, self._gone = born, gone
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        self._timeout_s = FIRST_BIRTH_S_MAX
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._popen = subprocess.Popen(
                [*command, "--socket-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        mine.setblocking(False)
        self._sock = mine
        self._loop.add_reader(mine, self._receive)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def is_gone(self) -> bool:
        """Return whether it has ended, and let go of its pid."""
        return self._popen.poll() is not None

    def ask(self, wish: SpareRequest, pipe: socket.socket, output: int) -> None:
        """Have a spare forked that owns this end of a pipe, and prints here.

        Raises:
            OSError: it is gone, or so many are asked for that it does not hear.
        """
        socket.send_fds(self._sock, [wish.text()], [pipe.fileno(), output])
        # It gives up imports that take too long, and forks without them.
        patience_s = self._timeout_s + (IMPORTS_S_MAX if wish.script else 0.0)
        timer = self._loop.call_later(patience_s, self._is_stuck, wish.number)
        self._waiting[wish.number] = timer

    def close(self) -> None:
        """Kill it; what it has forked lives on. It may take long to die, on a disk that hangs."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._popen.kill()
        self._popen.poll()

    def _receive(self) -> None:
        try:
            answer = self._sock.recv(BORN.size)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if len(answer) != BORN.size:
            self._end("it ended")
            return
        self._timeout_s = BIRTH_S_MAX
        number, pid = BORN.unpack(answer)
        timer = self._waiting.pop(number, None)
        if timer is not None:
            timer.cancel()
        self._born(number, pid)

    def _is_stuck(self, number: int) -> None:
        self._end(f"it has not forked process {number} within {self._timeout_s:g} s")

    def _end(self, why: str) -> None:
        log.warning("zygote_lost pid=%d reason=%r: spares take longer to start", self.pid, why)
        self.close()
        self._gone()
