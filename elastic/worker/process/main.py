"""A worker process, from the start as a spare to its end.

Forked by the zygote, or started by itself: `python -m elastic.worker.process.main`.

Rule: the process belongs to the agent that holds the other end of its pipe. It dies with the
agent, and it ends, leaves and begins only on the agent's word.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from elastic.core.config import STACKS_SIGNAL
from elastic.runtime import worker_ports
from elastic.worker.base.signals import leave_to_agent

if TYPE_CHECKING:
    from elastic.worker.group.group import ProcessGroups

PR_SET_PDEATHSIG = 1
EXIT_AGENT_GONE = 70
EXIT_REPLACED = 71


def die_with_parent() -> None:
    """Have the kernel kill this process when the agent's thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def has_agent(sock: socket.socket) -> bool:
    """Return whether the other end of the pipe is still held.

    It may have been closed before `die_with_parent` was called; the parent's pid does not show it,
    because an agent can be process 1 of its container.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


def check_protocol(theirs: str) -> None:
    """Exit if the package was replaced since the agent imported it, by one of another protocol.

    It would misread what the agent sends, which has reported which workers ours understand.

    Args:
        theirs: the agent's protocol, "" if it is ours.
    """
    from elastic.core.messages import PROTOCOL

    if theirs and theirs != PROTOCOL:
        print(
            f"the agent speaks protocol {theirs}, the elastic-torch that is installed now speaks "
            f"{PROTOCOL}: restart elastic-agent on this node",
            file=sys.stderr,
        )
        sys.exit(EXIT_REPLACED)


def name_process(name: str) -> None:
    """Let `top` and `ps -o comm` show this name; at most 15 characters of it."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


class PlainChildren:
    """Lets a fork of this process end on SIGTERM and SIGINT, as its creator expects.

    The signals are held back while it is made: one that came before the fork has its own handlers
    would be left to the agent, and its maker would wait for its end for ever.
    """

    HELD = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._before: set[int] = set()
        os.register_at_fork(
            before=self._hold, after_in_parent=self._go_on, after_in_child=self._be_plain
        )

    def _hold(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self.HELD)

    def _go_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def _be_plain(self) -> None:
        if signal.getsignal(signal.SIGINT) is leave_to_agent:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is leave_to_agent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._go_on()


def set_up_process() -> None:
    """Signals, stack dumps and output, as a worker needs them."""
    # A handler and not SIG_IGN, which every program that user code starts would inherit.
    signal.signal(signal.SIGINT, leave_to_agent)
    signal.signal(signal.SIGTERM, leave_to_agent)
    signal.signal(signal.SIGUSR1, leave_to_agent)  # SLURM sends it to a whole step.
    PlainChildren()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # One write for each line, also with PYTHONUNBUFFERED: a stack dump, or another thread's
            # line, must not come between a line and its end.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def set_up_logs() -> None:
    """Print our own log lines to stderr, and leave the root logger to user code.

    What a script prints goes to the same place, and people read it: so warnings only, unless
    ELASTIC_LOG_LEVEL sets another level.
    """
    from elastic.runtime.logging_thread import line_formatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(line_formatter("elastic-worker"))
    ours = logging.getLogger("elastic")
    ours.handlers[:] = [handler]
    level = os.environ.get("ELASTIC_LOG_LEVEL", "").upper()
    ours.setLevel(level if level in ("DEBUG", "INFO", "ERROR") else "WARNING")
    ours.propagate = False


def run_worker(sock: socket.socket, started_with: Mapping[str, str], groups: ProcessGroups) -> None:
    """Start the control thread, and let the main thread take orders for ever."""
    from elastic.runtime.clock import SystemClock
    from elastic.wire.pipe import Pipe
    from elastic.worker.base.interrupt import Interrupter
    from elastic.worker.base.mailboxes import Mailboxes
    from elastic.worker.process.control import ControlThread
    from elastic.worker.process.gloo_watchdog import StuckWaitWatchdog
    from elastic.worker.process.runner import Runner

    clock, mailboxes = SystemClock(), Mailboxes()
    interrupter = Interrupter(overdue=StuckWaitWatchdog(groups).check)
    ControlThread(
        Pipe(sock), mailboxes, groups=groups, interrupter=interrupter, clock=clock
    ).start()
    Runner(
        mailboxes, groups=groups, interrupter=interrupter, started_with=started_with, clock=clock
    ).run()


@click.command(help="A training process; started by elastic-agent.")
@click.option("--pipe-fd", type=int, required=True, help="Inherited socket to the agent.")
@click.option("--protocol", default="", help="Of the agent; empty: ours.")
def main(pipe_fd: int, protocol: str) -> None:
    """Be a worker until asked to end."""
    check_protocol(protocol)
    be_worker(pipe_fd)


def be_worker(pipe_fd: int, warm: tuple[Mapping[str, str], ProcessGroups] | None = None) -> None:
    """Be a worker until asked to end.

    Args:
        pipe_fd: socket to the agent, which is our parent.
        warm: the environment before warming up, and this process's groups; None if it is cold.
    """
    die_with_parent()
    name_process("elastic-worker")
    sock = socket.socket(fileno=pipe_fd)
    if not has_agent(sock):
        sys.exit(EXIT_AGENT_GONE)
    os.set_inheritable(pipe_fd, False)
    set_up_process()
    set_up_logs()
    run_worker(sock, *(warm or (warm_up_here(), take_torch())))


def warm_up_here() -> Mapping[str, str]:
    """Import what training needs; returns the environment before that."""
    from elastic.worker.process.warmup import warm_up

    started_with = dict(os.environ)
    warm_up(chooses_ports=bool(started_with.get(worker_ports.VARIABLE)))
    return started_with


def take_torch() -> ProcessGroups:
    """Replace functions of torch's, and return this process's groups, which do their work.

    Before a script's imports: packages that are imported earlier keep torch's own by name.
    """
    from elastic.worker.group.group import ProcessGroups

    end_with_loaders()
    return ProcessGroups()


def end_with_loaders() -> None:
    """From now on a process whose DataLoader loses a process to SIGKILL ends by that, too.

    The system kills either for want of memory. Torch would raise it in the main thread, wherever
    that is, as an error of the script.
    """
    from torch.utils.data._utils import signal_handling

    check: Callable[[], None] = signal_handling._error_if_any_worker_fails

    def check_and_end() -> None:
        try:
            check()
        except RuntimeError as error:
            what = str(error).rstrip(". ")
            if not what.endswith("killed by signal: Killed"):
                raise
            # Not through a stream or a logger: the main thread may be inside of one right now.
            os.write(2, f"{what}: this worker ends with it\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    signal_handling._error_if_any_worker_fails = check_and_end


if __name__ == "__main__":
    main()
