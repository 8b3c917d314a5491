"""The process that spares are forked from: `python -m elastic.worker.zygote`.

To import torch takes 3 s of a processor; a node whose workers are killed again and again would
spend its time on that instead of training. The zygote has imported everything once, does nothing
else, and forks on the agent's word: some 20 ms.

Rule: it starts no thread and touches no accelerator, so that a fork of it is as good as a process
started by itself. What it forks is handed to the agent, which is told to adopt orphans (a child
subreaper), and dies with the agent like any worker.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import sys
import time

import click

from elastic.worker.main import (
    EXIT_AGENT_GONE,
    be_worker,
    check_protocol,
    die_with_parent,
    has_agent,
    name_process,
    warm_up_here,
)

BORN = struct.Struct("<qq")
"""An answer: the number that was asked for, and the pid, or minus the error's number."""
ADOPTION_PAUSE_S = 0.0005


def serve(sock: socket.socket) -> int:
    """Fork whenever the agent asks; returns in the forked ones only.

    Args:
        sock: to the agent. A request is a number, with a pipe's end and an output as descriptors.

    Returns:
        The end of the pipe to the agent.
    """
    while True:
        request, descriptors, _, _ = socket.recv_fds(sock, 64, 2)
        if not request:
            os._exit(EXIT_AGENT_GONE)
        pipe_fd, output_fd = descriptors
        reading, writing = os.pipe()
        pid = _fork(writing)
        if pid == 0:
            for number in (1, 2):
                os.dup2(output_fd, number)
            for number in (output_fd, reading, writing):
                os.close(number)
            sock.close()
            return pipe_fd
        for number in (pipe_fd, output_fd, writing):
            os.close(number)
        # Once the one between us is waited for, the agent has adopted what it forked.
        answer = os.read(reading, 32)
        os.close(reading)
        if pid > 0:
            os.waitpid(pid, 0)
        sock.send(BORN.pack(int(request), int(answer or -errno.ECHILD)))


def _fork(writing: int) -> int:
    """Fork a process that forks a worker, writes the worker's pid, and ends.

    Returns:
        That one's pid; 0 in the worker, once the agent is its parent; -1 if nothing was forked.
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import numpy as np

    import elastic.worker.control
    import elastic.worker.runner  # noqa: F401
    from elastic.worker.gloo_trial import try_once_beside
    from elastic.worker.torch_names import check_torch

    started_with = warm_up_here()
    check_torch(started_with)
    try_once_beside(started_with, sock)
    pipe_fd = serve(sock)
    np.random.seed()  # As Python's own does after a fork; or all would draw the same.
    be_worker(pipe_fd, started_with)


if __name__ == "__main__":
    main()
