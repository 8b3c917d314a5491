"""The file in which a coordinator says that it serves, and where.

Rule: it is written whole or not at all, so that whoever finds it can read it.
"""

from __future__ import annotations

import select
import time
from pathlib import Path

from elastic.errors import CoordinatorUnreachable

POLL_S = 0.01


def address_in(text: str) -> str:
    """Return the address of a ready line: "... address=HOST:PORT ...".

    Raises:
        CoordinatorUnreachable: there is none in it.
    """
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "address":
            return value
    raise CoordinatorUnreachable("(unknown)", f"the ready file says {text!r}")


def wait_address(path: Path, tether_fd: int, timeout_s: float) -> str:
    """Wait for a coordinator that is being started, and return its address.

    Args:
        path: its ready file.
        tether_fd: readable once whoever starts both is gone; below 0 if nobody does.
        timeout_s: for how long.

    Raises:
        CoordinatorUnreachable: the time is over, or whoever starts it is gone.
    """
    deadline = time.monotonic() + timeout_s
    watched = [tether_fd] if tether_fd >= 0 else []
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text().strip()):
            return address_in(text)
        if select.select(watched, [], [], POLL_S)[0]:
            raise CoordinatorUnreachable("(unknown)", "whoever started this agent is gone")
    raise CoordinatorUnreachable("(unknown)", f"nothing stands in {path} after {timeout_s:g} s")
