"""The process that spares are forked from: `python -m elastic.worker.process.zygote`.

Importing torch takes 3 s of a processor; a node whose workers are killed again and again would
spend its time on that. The zygote has imported everything once, and forks when the agent asks, in
some 20 ms. For the workers of a job whose imports are known it first forks an import zygote, which
makes these imports and forks in its place.

Rule: it starts no thread and touches no accelerator, so that a fork of it behaves like a process
started by itself. The agent is a child subreaper: it adopts what is forked here, which ends with
the agent like any worker.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from elastic.worker.process.main import (
    EXIT_AGENT_GONE,
    be_worker,
    check_protocol,
    die_with_parent,
    has_agent,
    name_process,
    take_torch,
    warm_up_here,
)

if TYPE_CHECKING:
    from elastic.worker.process.import_zygote import ImportPlan

FORKED = struct.Struct("<qq")
"""An answer: the number that was asked for, and the pid, or minus the error's number."""
ADOPTION_PAUSE_S = 0.0005
REQUEST_BYTES_MAX = 192_000
"""More than the agent sends of imports, and than the names of all modules that one imports."""
IMPORTS_S = 120.0
"""Imports that take longer are left to the workers."""
IMPORT_ZYGOTES_MAX = 2
"""Jobs whose imports are kept: those that run now, as a rule."""


@dataclass
class ImportZygote:
    """A fork that makes a job's imports and forks its workers; see `import_zygote`.

    Attributes:
        sock: to it; None once it is gone, or of no use: its workers are forked here.
        gives_up_at: when its imports have taken too long; None once they are made.
        waiting: the ends that it was sent of workers that it has not forked yet, by number.
        is_second: the first one imported a package that must be left to each worker.
    """

    plan: ImportPlan
    is_second: bool = False
    sock: socket.socket | None = None
    pid: int = 0
    gives_up_at: float | None = None
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def end(self) -> None:
        """Let it go; its workers live on."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class WorkerZygote:
    """Forks whenever the agent asks."""

    def __init__(self, sock: socket.socket) -> None:
        """Begin without import zygotes.

        A request on the socket is `agent.zygote.SpareRequest.text`, with a pipe's end and an output
        as descriptors.
        """
        self._sock = sock
        self._import_zygotes: dict[str, ImportZygote] = {}

    def serve(self) -> int:
        """Fork for ever; returns the end of the pipe to the agent, in the forked ones only."""
        while True:
            for sock in self._wait():
                pipe_fd = self._take_request() if sock is self._sock else self._receive(sock)
                if pipe_fd is not None:
                    return pipe_fd
            for import_zygote in list(self._import_zygotes.values()):
                late = import_zygote.gives_up_at
                if late is not None and time.monotonic() >= late:
                    pipe_fd = self._is_gone(import_zygote)
                    if pipe_fd is not None:
                        return pipe_fd

    def _wait(self) -> list[socket.socket]:
        """Return the peers with something to read, none if an import has taken too long."""
        socks = [n.sock for n in self._import_zygotes.values() if n.sock is not None]
        moments = [
            n.gives_up_at for n in self._import_zygotes.values() if n.gives_up_at is not None
        ]
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        return select.select([self._sock, *socks], [], [], timeout)[0]

    def _take_request(self) -> int | None:
        """Take a request; returns the end of its pipe in the process that it asked for."""
        request, descriptors, _, _ = socket.recv_fds(self._sock, REQUEST_BYTES_MAX, 2)
        if not request:
            os._exit(EXIT_AGENT_GONE)
        number, imports = request.decode().split(" ", 1)
        pipe_fd, output_fd = descriptors
        if not imports:
            return self._fork_here(int(number), pipe_fd, output_fd)
        import_zygote = self._import_zygotes.get(imports)
        is_new = import_zygote is None
        if import_zygote is None:
            import_zygote = self._import_zygotes[imports] = ImportZygote(_read(imports))
        # Before an import zygote is forked, which would keep them open: then a worker's output, and
        # the pipe of one that died, had no end as long as the import zygote runs.
        import_zygote.waiting[int(number)] = pipe_fd, output_fd
        if is_new:
            if (end := self._begin(import_zygote)) is not None:
                return end
            for old in [*self._import_zygotes][:-IMPORT_ZYGOTES_MAX]:
                if not self._import_zygotes[old].waiting:
                    self._import_zygotes.pop(old).end()
        return self._pass_on(import_zygote, [int(number)])

    def _begin(self, import_zygote: ImportZygote) -> int | None:
        """Fork an import zygote; returns the end of a pipe in workers that it forks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        import_zygote.pid = os.fork()
        if import_zygote.pid == 0:
            die_with_parent()
            name_process("elastic-imports")
            ours.close()
            self._close_in_fork()
            from elastic.worker.process.import_zygote import run

            run(import_zygote.plan, theirs)
            theirs.send(FORKED.pack(0, 0))
            self._sock, self._import_zygotes = theirs, {}
            return self.serve()
        theirs.close()
        import_zygote.sock = ours
        import_zygote.gives_up_at = time.monotonic() + IMPORTS_S
        return None

    def _pass_on(self, import_zygote: ImportZygote, numbers: Iterable[int]) -> int | None:
        """Have an import zygote fork workers; or do it here, if there is none."""
        for number in numbers:
            if import_zygote.sock is not None:
                with contextlib.suppress(OSError):  # Its end is noticed shortly.
                    descriptors = import_zygote.waiting[number]
                    socket.send_fds(import_zygote.sock, [f"{number} ".encode()], descriptors)
            else:
                pipe_fd = self._fork_here(number, *import_zygote.waiting.pop(number))
                if pipe_fd is not None:
                    return pipe_fd
        return None

    def _receive(self, sock: socket.socket) -> int | None:
        """Take an import zygote's message: imports are made, a worker is forked, or it failed."""
        found = [one for one in self._import_zygotes.values() if one.sock is sock]
        if not found:  # A newer one has just taken its place.
            return None
        (import_zygote,) = found
        try:
            answer = sock.recv(REQUEST_BYTES_MAX)
        except OSError:
            answer = b""
        if len(answer) == FORKED.size:
            import_zygote.gives_up_at = None
            number, _ = FORKED.unpack(answer)
            if number:
                for fd in import_zygote.waiting.pop(number):
                    os.close(fd)
                self._sock.send(answer)
            return None
        modules = tuple(json.loads(answer)) if answer else ()
        if not modules or import_zygote.is_second:
            return self._is_gone(import_zygote)
        import_zygote.end()
        import_zygote.plan = replace(import_zygote.plan, modules=modules)
        import_zygote.is_second = True
        if (pipe_fd := self._begin(import_zygote)) is not None:
            return pipe_fd
        return self._pass_on(import_zygote, list(import_zygote.waiting))

    def _is_gone(self, import_zygote: ImportZygote) -> int | None:
        plan = import_zygote.plan
        packages = sorted({name.partition(".")[0] for name in plan.modules})
        what = plan.path or ", ".join(packages)
        print(f"the imports of {what} are left to the workers", file=sys.stderr)
        import_zygote.end()
        import_zygote.gives_up_at = None
        return self._pass_on(import_zygote, list(import_zygote.waiting))

    def _close_in_fork(self) -> None:
        """Close in a fork that is no zygote all sockets of ours, and what we hold for others."""
        self._sock.close()
        for import_zygote in self._import_zygotes.values():
            if import_zygote.sock is not None:
                import_zygote.sock.close()
            for descriptors in import_zygote.waiting.values():
                for fd in descriptors:
                    os.close(fd)

    def _fork_here(self, number: int, pipe_fd: int, output_fd: int) -> int | None:
        """Fork a worker and report it; returns the end of its pipe in the worker."""
        reading, writing = os.pipe()
        pid = _fork(writing)
        if pid == 0:
            for fd in (1, 2):
                os.dup2(output_fd, fd)
            for fd in (output_fd, reading, writing):
                os.close(fd)
            self._close_in_fork()
            return pipe_fd
        for fd in (pipe_fd, output_fd, writing):
            os.close(fd)
        # Once the one between us is waited for, the agent has adopted what it forked.
        answer = os.read(reading, 32)
        os.close(reading)
        if pid > 0:
            os.waitpid(pid, 0)
        self._sock.send(FORKED.pack(number, int(answer or -errno.ECHILD)))
        return None


def _read(imports: str) -> ImportPlan:
    from elastic.worker.process.import_zygote import ImportPlan

    return ImportPlan.read(imports)


def _fork(writing: int) -> int:
    """Fork a process that forks a worker, writes the worker's pid, and ends; return its own.

    The worker gets 0, once the agent is its parent; -1 if nothing was forked.
    """
    try:
        between = os.fork()
    except OSError as error:
        os.write(writing, str(-(error.errno or 1)).encode())
        return -1
    if between:
        return between
    me = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os.write(writing, str(-(error.errno or 1)).encode())
        os._exit(1)
    if worker:
        os.write(writing, str(worker).encode())
        os._exit(0)
    os.setsid()
    while os.getppid() == me:
        time.sleep(ADOPTION_PAUSE_S)
    return 0


@click.command(help="The process that spares are forked from; started by elastic-agent.")
@click.option("--socket-fd", type=int, required=True, help="Inherited socket to the agent.")
@click.option("--protocol", default="", help="Of the agent; empty: ours.")
def main(socket_fd: int, protocol: str) -> None:
    """Import everything, then fork until the agent ends."""
    check_protocol(protocol)
    die_with_parent()
    name_process("elastic-zygote")
    sock = socket.socket(fileno=socket_fd)
    if not has_agent(sock):
        sys.exit(EXIT_AGENT_GONE)
    os.set_inheritable(socket_fd, False)
    # A signal to the whole node is left to the agent, as workers do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    import numpy as np

    from elastic.worker.base.torch_names import check_torch
    from elastic.worker.process.gloo_trial import try_once_beside

    started_with = warm_up_here()
    check_torch(started_with)
    try_once_beside(started_with, sock)
    groups = take_torch()
    pipe_fd = WorkerZygote(sock).serve()
    np.random.seed()  # As Python's own does after a fork; or all would draw the same.
    be_worker(pipe_fd, (started_with, groups))


if __name__ == "__main__":
    main()
