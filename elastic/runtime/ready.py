"""The ready file, in which a coordinator reports that it serves, and its address.

Rule: it is written atomically, so that a reader never sees a part of it.
"""

from __future__ import annotations

import time
from pathlib import Path

from elastic.errors import CoordinatorUnreachable
from elastic.runtime.tether import is_cut

POLL_S = 0.01


def address_in(text: str) -> str:
    """Return the address of a ready line: "... address=HOST:PORT ...".

    Raises:
        CoordinatorUnreachable: the line has no address.
    """
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "address":
            return value
    raise CoordinatorUnreachable("(unknown)", f"the ready file contains {text!r}")


def wait_address(path: Path, tether_fd: int, timeout_s: float) -> str:
    """Wait for a coordinator that is being started, and return its address.

    Args:
        path: its ready file.
        tether_fd: readable once the process that started both is gone; below 0 for none.
        timeout_s: how long to wait.

    Raises:
        CoordinatorUnreachable: the wait timed out, or the process that started both is gone.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text().strip()):
            return address_in(text)
        if is_cut(tether_fd):
            raise CoordinatorUnreachable("(unknown)", "the process that started this agent is gone")
        time.sleep(POLL_S)
    raise CoordinatorUnreachable("(unknown)", f"nothing stands in {path} after {timeout_s:g} s")
