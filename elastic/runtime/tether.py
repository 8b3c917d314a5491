"""Tethers: a daemon ends when the process that started it is gone, for any reason.

Rule: the starting process holds the writing end of a pipe, and writes nothing; the daemon watches
the reading end, which reaches its end when the last holder of the writing end is gone.
"""

from __future__ import annotations

import os
import select
import stat

from elastic.errors import ConfigError


def check_tether(fd: int) -> None:
    """Refuse a descriptor that is not open, or cannot signal the end of its other side.

    Raises:
        ConfigError: it is not an open pipe or socket.
    """
    if fd < 0:
        return
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise ConfigError(
            f"--tether-fd {fd}: expected the read end of a pipe that the daemon's parent "
            f"keeps open; leave the option out if there is none"
        )


def is_cut(fd: int) -> bool:
    """Return whether the process at the other end is gone; False below 0, for no tether."""
    tether = select.poll()  # Unlike select(), it takes descriptors of 1,024 and more.
    if fd >= 0:
        tether.register(fd, select.POLLIN)
    return bool(tether.poll(0))
