"""Tries out what we rely on in gloo: two members in one process, and their connections cut.

How a broken collective is reported, and where what follows it is called, is no API of torch's: a
release that changes it would have a lost peer count as a failure of user code, or all members of a
broken group replaced.

Rule: run in a process of its own, because it starts threads. Once for each torch: who passed is
remembered.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.core.broken import broken_words_in
from elastic.worker.group.group_resources import FORGOTTEN_S, join_threads
from elastic.worker.process.main import die_with_parent

TIMEOUT = datetime.timedelta(seconds=20)
"""Of a healthy trial some milliseconds are used."""


def try_gloo() -> list[str]:
    """Return what is not as we rely on, a sentence for each; [] if all is well."""
    before = _sockets()
    try:
        members = _pair()
        return _differences(members, _sockets() - before)
    except Exception as error:
        return [f"a trial of gloo failed: {type(error).__name__}: {error}"]


def _pair() -> list[Any]:
    """Return two connected members."""
    store = dist.HashStore()
    gloo = distributed_c10d.ProcessGroupGloo
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: gloo(store, rank, 2, TIMEOUT), range(2)))


def _differences(members: list[Any], sockets: set[int]) -> list[str]:
    found = []
    works = [member.allreduce([torch.ones(4)]) for member in members]
    for work in works:
        work.wait()
    waits = members[0].allreduce([torch.ones(4)])
    if not sockets:
        found.append("gloo opened no sockets that could be cut")
    for number in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as cut:
            cut.shutdown(socket.SHUT_RD)
    try:
        waits.wait()
        found.append("a collective whose connections were cut returned as if nothing had happened")
    except RuntimeError as error:
        if not broken_words_in(str(error)):
            found.append(f"gloo reports a cut connection in other words: {error}")
    if not all(join_threads(one, time.monotonic() + FORGOTTEN_S) for one in members):
        found.append("gloo does not call what follows a collective in a thread of its own")
    return found


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                # gloo ends the process if what it listens at is cut.
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
    return found


def passed_file(environ: Mapping[str, str]) -> Path:
    """Return the file that exists once this torch has passed."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp") / ".cache"
    version = torch.__version__.replace("/", "-")
    return Path(base) / "elastic-torch" / f"gloo-passed-{version}-{torch.version.git_version[:12]}"


def try_once_beside(environ: Mapping[str, str], agent: socket.socket) -> None:
    """Try gloo in a fork of this process, which continues meanwhile, unless this torch has passed.

    What differs is printed: to the agent's log, from the zygote.

    Args:
        environ: of this process.
        agent: this process's connection, which ends with it alone.
    """
    path = passed_file(environ)
    if path.exists() or os.fork():
        return
    try:
        agent.close()
        die_with_parent()
        differences = try_gloo()
        for each in differences:
            print(f"torch {torch.__version__} is not as expected: {each}", file=sys.stderr)
        if not differences:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        sys.stderr.flush()
    finally:
        os._exit(0)
