"""What Linux knows of processes: how they ended, what they do, and who belongs to a session.

Rule: signals go only to process ids that cannot have passed to a stranger: our own children
that are not reaped yet, and members of a session whose leader's id is still taken.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket

from elastic.core.policy.failure import OUT_OF_MEMORY
from elastic.core.world import ExitCause, ExitKind
from elastic.errors import InvariantViolation

log = logging.getLogger(__name__)

DEAD = ("", "Z", "X")
"""States of a process that does nothing any more, or is gone."""


def status_of_zombie(pid: int) -> os.waitid_result:
    """Return how a dead child ended, and leave its pid taken."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if status is None:
        raise InvariantViolation(f"process {pid} was told to be dead and is not")
    return status


def reap(pid: int) -> None:
    """Let go of a zombie's pid."""
    os.waitpid(pid, 0)


class MemoryKills:
    """Tells whether the kernel has killed anybody for memory since this was last asked."""

    def __init__(self) -> None:
        """Begin with what was before."""
        self._known = _memory_kills()

    def is_new(self) -> bool:
        """Return whether it has; also in a control group."""
        known, self._known = self._known, _memory_kills()
        return self._known > known


def _memory_kills() -> int:
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def exit_cause(
    status: os.waitid_result, memory_kills: MemoryKills, last_line: str = ""
) -> ExitCause:
    """Return the cause that a wait status tells; `last_line` goes into the detail."""
    if status.si_code == os.CLD_EXITED:
        return ExitCause(ExitKind.CODE, status.si_status, last_line)
    core = "core dumped" if status.si_code == os.CLD_DUMPED else ""
    is_memory = status.si_status == signal.SIGKILL and memory_kills.is_new()
    memory = OUT_OF_MEMORY if is_memory else ""
    detail = ", ".join(part for part in (core, memory, last_line) if part)
    return ExitCause(ExitKind.SIGNAL, status.si_status, detail)


def signal_group(pid: int) -> None:
    """Send SIGKILL to the process group that this (unreaped) process leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        kill_quietly(pid)


def kill_quietly(pid: int) -> None:
    """Send SIGKILL; a process that is gone, or became another user's, is no error."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError) as error:
        log.debug("not_killed pid=%d error=%r", pid, str(error))


def readable(end: socket.socket) -> bool:
    """Return whether reading from the socket would give something, be it its end."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty when there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096).decode("ascii", "replace")
    except OSError:
        return []
    # The name before the last ")" may hold spaces and brackets of its own.
    return text.rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does: R, S, D, T (stopped), Z, or ""."""
    return next(iter(read_stat(pid)), "")


def session_members(session: int) -> list[int]:
    """Return the living processes of a session (the leader's zombie does not count)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = read_stat(int(name))
        if len(fields) > 3 and fields[3] == str(session) and fields[0] not in DEAD:
            found.append(int(name))
    return sorted(found)
