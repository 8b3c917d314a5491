"""Process information from Linux: exit causes, states, and the members of a session.

Rule: signals go only to process ids that cannot have been reused: our own children that are not
reaped yet, and members of a session whose leader's id is still taken.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket

from elastic.core.facts import ExitCause, ExitKind
from elastic.core.policy.failure import OUT_OF_MEMORY
from elastic.errors import InvariantViolation

log = logging.getLogger(__name__)

DEAD = ("", "Z", "X")
"""States of a dead process: gone, zombie, dead."""


def status_of_zombie(pid: int) -> os.waitid_result:
    """Return how a dead child ended, and leave its pid taken."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if status is None:
        raise InvariantViolation(f"process {pid} was reported dead and is not")
    return status


def reap(pid: int) -> None:
    """Wait for a zombie, which frees its pid."""
    os.waitpid(pid, 0)


class MemoryKills:
    """Detects kills by the kernel's OOM killer since the last call."""

    def __init__(self) -> None:
        """Start from the kernel's present count."""
        self._known = _memory_kills()

    def is_new(self) -> bool:
        """Return whether there was a new kill, on this machine or in a control group."""
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
    """Return the exit cause for a wait status; `last_line` goes into the detail."""
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
    """Send SIGKILL; a process that is gone, or runs as another user by now, is no error."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError) as error:
        log.debug("not_killed pid=%d error=%r", pid, str(error))


def readable(end: socket.socket) -> bool:
    """Return whether a read would return at once: data, or the end of the stream."""
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
    """Return the kernel's letter for a process state: R, S, D, T (stopped), Z; "" if gone."""
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
