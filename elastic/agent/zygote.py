"""The agent's side of its zygote: the process that has imported torch, and forks spares.

Rule: a zygote that fails is not a failure of the node. The caller is notified by `on_gone`: it
starts another one, or spares as new processes, which takes longer.
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
from elastic.core.facts import Entry, EntryKind

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
FORKED = struct.Struct("<qq")
"""A reply: the requested number, and the pid, or minus an errno."""
FIRST_BIRTH_S_MAX = 300.0
"""Timeout of the first reply. A zygote that imports torch on a slow disk or a busy machine must not
be given up: each worker would import torch beside all the others."""
BIRTH_S_MAX = 5.0
"""Timeout of later replies."""
LATE_S = 1.0
"""A timer that fires so late is no fault of the zygote: the agent, or its host, was stopped."""
IMPORTS_S_MAX = 300.0
"""Added to the timeout when a job's imports are made first; the zygote gives up sooner."""
IMPORTS_BYTES_MAX = 32_000
"""Largest description of imports, with the environment in which they are made, that is sent."""


@dataclass(frozen=True)
class SpareRequest:
    """A request for a spare.

    Attributes:
        number: the agent's number for the spare.
        imports: JSON of the script or the modules that are imported in advance, "" for none. It has
            the job, as another one may find other versions of packages.
    """

    number: int
    imports: str = ""

    @classmethod
    def of(cls, number: int, job_id: str, entry: Entry | None) -> SpareRequest:
        """Return the request; imports that are too large for a message are left out."""
        if entry is None:
            return cls(number)
        fields = {
            "job": job_id,
            "path": entry.target if entry.kind is EntryKind.SCRIPT else "",
            "folders": [entry.working_dir, *entry.python_path],
            "env": dict(entry.env),
            "modules": entry.imports,
        }
        text = json.dumps(fields)
        return cls(number, text) if len(text) <= IMPORTS_BYTES_MAX else cls(number)

    def text(self) -> bytes:
        """Return the message: the number and the imports, separated by a space."""
        return f"{self.number} {self.imports}".encode()


def adopt_orphans() -> None:
    """Become the parent of processes that our children leave behind (a child subreaper).

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def reap_adopted(known: Callable[[int], bool]) -> None:
    """Reap dead processes that we adopted, and that no other code waits for."""
    for pid in _children():
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            # Processes in our own session were not adopted from a worker.
            if not known(pid) and process_state(pid) == "Z" and os.getsid(pid) != os.getsid(0):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # A kernel without that list.
        return []


class Zygote:
    """One zygote, from its start to its end; runs on the agent's event loop.

    Attributes:
        has_forked: it has forked a process, so its imports work.
    """

    has_forked = False

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        on_forked: Callable[[int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        """Start it.

        Args:
            command: `--socket-fd N` is appended.
            env: its whole environment, which the processes that it forks inherit.
            output: file descriptor of its own stdout and stderr; forked processes print to pipes.
            on_forked: called with the requested number, and the pid (below 0: minus an errno).
            on_gone: called once if it ends by itself or is stuck; nothing is forked after that.

        Raises:
            OSError: it cannot be started.
        """
        adopt_orphans()
        self._on_forked, self._on_gone = on_forked, on_gone
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
        return self._popen.pid

    def is_gone(self) -> bool:
        """Return whether it has ended; if so, reap it."""
        return self._popen.poll() is not None

    def request(self, request: SpareRequest, pipe: socket.socket, output: int) -> None:
        """Request a spare that owns this end of a pipe, and prints to `output`.

        Raises:
            OSError: the zygote is gone, or its socket is full of requests.
        """
        socket.send_fds(self._sock, [request.text()], [pipe.fileno(), output])
        # The zygote gives up imports that take too long, and forks without them.
        patience_s = self._timeout_s + (IMPORTS_S_MAX if request.imports else 0.0)
        timer = self._loop.call_later(patience_s, self._is_stuck, request.number)
        self._waiting[request.number] = timer

    def close(self) -> None:
        """Kill it; processes that it forked live on. On a hung disk it may take long to die."""
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
        """Read all replies: after a pause of this agent, timers of several may be due at once."""
        while self._sock.fileno() >= 0 and self._receive_one():
            pass

    def _receive_one(self) -> bool:
        try:
            answer = self._sock.recv(FORKED.size)
        except BlockingIOError:
            return False
        except OSError:
            answer = b""
        if len(answer) != FORKED.size:
            self._end("it ended")
            return False
        self._timeout_s, self.has_forked = BIRTH_S_MAX, True
        number, pid = FORKED.unpack(answer)
        timer = self._waiting.pop(number, None)
        if timer is not None:
            timer.cancel()
        self._on_forked(number, pid)
        return True

    def _is_stuck(self, number: int) -> None:
        self._receive()
        if number not in self._waiting:
            return
        late_s = self._loop.time() - self._waiting[number].when()
        if late_s > LATE_S:  # We were stopped, and the zygote perhaps with us.
            self._waiting[number] = self._loop.call_later(self._timeout_s, self._is_stuck, number)
            return
        self._end(f"it has not forked process {number} within {self._timeout_s:g} s")

    def _end(self, why: str) -> None:
        log.warning("zygote_lost pid=%d reason=%r", self.pid, why)
        self.close()
        self._on_gone()
