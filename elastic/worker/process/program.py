"""A program in place of a train function: run as a child of the worker, anew for each group.

What `elastic run --no-python` asks for: `python -m elastic.worker.process.program COMMAND ARGS`.
The child finds its place in the environment and forms its own group, over a store that rank 0's
worker opens for this group alone: torch gives the keys of two attempts the same names.

Rule: the child does not outlive the worker, nor the group it was started for. How it ends is how
the worker ends: a code or a crash is a failure of user code, a kill kills the worker too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from elastic.core.broken import broken_words_in
from elastic.errors import GroupError, ProgramFailed, UsageError
from elastic.runtime import worker_ports
from elastic.runtime.worker_ports import PortRange, listen_within, remedy
from elastic.worker.engine.train_call import current
from elastic.worker.process.main import die_with_parent

log = logging.getLogger("elastic.worker.process.program")

LEAVE_S = 3.0
"""Between asking a child of a group that is over to end, and killing it."""
OTHERS_S = 1.0
"""A child that fails may do so because another one was lost: so long its group may turn out to be
over before the failure is taken for its own."""
POLL_S = 0.02
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's `@record` writes down what a script raised."""
PORT_KEY = "program/port"
BACKLOG = 1024
"""Programs that may connect at the same moment."""
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside: the worker is then lost, as if it had been sent to it."""


def main(words: list[str], environ: Mapping[str, str]) -> None:
    """Run a command to its end.

    Raises:
        UsageError: it cannot be started.
        ProgramFailed: it failed; with what torch's `@record` wrote down, if it is used.
    """
    with _store_for_children(environ) as address:
        killed_by = _run(words, {**environ, **address})
        if killed_by:
            _die_as_lost(killed_by)


def _run(words: list[str], environ: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="elastic-") as directory:
        error_file = Path(directory) / "error.json"
        code = _wait_for(words, {**environ, ERROR_FILE: str(error_file)})
        failure = _reported_by(error_file, code) if code else None
    if failure is not None and not broken_words_in(failure.traceback):
        raise failure
    if code and -code not in KILLS:
        time.sleep(OTHERS_S)
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        raise failure or ProgramFailed(f"{' '.join(words)} {how}", "", code)
    return -code


def _wait_for(words: list[str], environ: Mapping[str, str]) -> int:
    """Start a child and wait for its end, also for that of what it has left behind."""
    context = current()
    child: subprocess.Popen[bytes] | None = None
    try:
        # If interrupted in between, the process would be leaked.
        with contextlib.nullcontext() if context is None else context.shielded():
            child = _start(words, environ)
        with _passing_on(child):
            return child.wait()
    finally:
        if child is not None:
            _end(child)


@contextlib.contextmanager
def _passing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let the child have the SIGTERM with which its job is stopped: it may have a handler."""
    before = signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _store_for_children(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Open a store at rank 0; yields its address, for the children of all members."""
    # The worker's own, which stands; the first to end waits for the others, however long they take.
    dist.init_process_group(timeout=timedelta(days=365))
    ours, host = _get_default_store(), environ["MASTER_ADDR"]
    server: dist.TCPStore | None = None
    if dist.get_rank() == 0:
        server = _open_store(host, PortRange.of(environ.get(worker_ports.VARIABLE, "")))
        ours.set(PORT_KEY, str(server.port))
    yield {"MASTER_ADDR": host, "MASTER_PORT": bytes(ours.get(PORT_KEY)).decode()}
    dist.barrier()  # The others may still be using it.
    del server


def _open_store(host: str, ports: PortRange) -> dist.TCPStore:
    """Return torch's own store, on this address alone: what a program for torchrun connects to.

    Raises:
        GroupError: this machine does not have the address, or no port of the range is free.
    """
    try:
        listener = listen_within(ports, host, backlog=BACKLOG)
    except OSError as error:
        raise GroupError(
            f"a store for programs cannot listen on {host}: {error}; {remedy(error)}"
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _start(words: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    worker = os.getpid()

    def tie() -> None:
        die_with_parent()
        if os.getppid() != worker:
            os._exit(1)
        # A group of its own, in the worker's session: what the agent sweeps if the worker is lost.
        os.setpgid(0, 0)

    try:
        return subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            preexec_fn=tie,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"program {words[0]} cannot be started on this node ({error}); it must be an "
            f"executable file here, or be found on PATH"
        ) from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and what it has started; gives it a moment if it still runs."""
    if child.poll() is None:
        _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _reported_by(error_file: Path, code: int) -> ProgramFailed | None:
    """Return the failure that a child wrote down, None if it did not."""
    try:
        message: Any = json.loads(error_file.read_text(errors="replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(message, str):
        return ProgramFailed(message, "", code)
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    if not isinstance(extra, dict):
        return None
    return ProgramFailed(str(message.get("message", "")), str(extra.get("py_callstack", "")), code)


def _die_as_lost(number: int) -> None:
    """End this worker as its child was ended: it counts as lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    log.info("program_killed signal=%d", number)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:], dict(os.environ))
