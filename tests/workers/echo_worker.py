"""A process with the worker's side of the pipe, which performs the commands in its job's args.

Run as `python echo_worker.py [--late COMMAND] --pipe-fd N`. On Assign it performs each of
`spec.entry.args` in order and then reports READY:

    print:TEXT      a line to stdout         error:TEXT   a line to stderr
    flood:N         N numbered lines, flushed
    child           a sleeping child process in the same session, its pid printed
    group           the same, in a process group of its own
    escape          a forked process in a session of its own, which keeps all descriptors open;
                    its pid printed
    nonsense        bytes that are not a frame
    exit:CODE       exit with this code
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys

from elastic.core.facts import WorkerPhase, WorkerReport
from elastic.core.messages import Assign, Ping, Pong, Stop, Warm, WorkerUpdate
from elastic.wire.pipe import Pipe

PR_SET_PDEATHSIG = 1
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


def perform(order: str, pipe_fd: int) -> None:
    """Perform one command."""
    name, _, value = order.partition(":")
    if name == "print":
        print(value, flush=True)
    elif name == "error":
        print(value, file=sys.stderr, flush=True)
    elif name == "flood":
        for number in range(int(value)):
            sys.stdout.write(f"line {number}\n")
        sys.stdout.flush()
    elif name in ("child", "group"):
        command = SLEEPER
        if name == "group":
            set_group = "import os, signal; os.setpgid(0, 0); print(os.getpid(), flush=True);"
            command = [sys.executable, "-c", set_group + "signal.pause()"]
            subprocess.Popen(command)
        else:
            print(subprocess.Popen(command).pid, flush=True)
    elif name == "escape":
        escape()
    elif name == "nonsense":
        os.write(pipe_fd, b"Traceback (most recent call last)")
    elif name == "exit":
        sys.exit(int(value))


def escape() -> None:
    """Fork a process that killing the session does not reach."""
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        signal.pause()
        os._exit(0)


def main() -> None:
    """Handle messages until a stop order, or until the agent has closed the pipe."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe_fd = int(sys.argv[sys.argv.index("--pipe-fd") + 1])
    if "--late" in sys.argv:
        perform(sys.argv[sys.argv.index("--late") + 1], pipe_fd)
    pipe = Pipe(socket.socket(fileno=pipe_fd))
    pipe.send(Warm(os.getpid()))
    for message in pipe:
        if isinstance(message, Ping):
            pipe.send(Pong(message.number))
        elif isinstance(message, Stop):
            return
        elif isinstance(message, Assign):
            spec = message.spec
            for order in spec.entry.args:
                perform(order, pipe_fd)
            pipe.send(
                WorkerUpdate(
                    WorkerReport(
                        message.worker_id,
                        spec.job_id,
                        WorkerPhase.READY,
                        store_address="127.0.0.1:1",
                        pid=os.getpid(),
                    )
                )
            )


if __name__ == "__main__":
    main()
