"""Tethers: a daemon ends when the process that started it is gone, however that went.

Rule: whoever starts a daemon holds the writing end of a pipe, and writes nothing; the daemon
watches the reading end, which ends with the last who held the other one.
"""

from __future__ import annotations

import os
import stat

from elastic.errors import ConfigError


def check_tether(fd: int) -> None:
    """Refuse what nobody holds, or what never ends.

    Raises:
        ConfigError: not the end of a pipe or of a socket that is open.
    """
    if fd < 0:
        return
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise ConfigError(
            f"--tether-fd {fd}: expected the reading end of a pipe that whoever starts the daemon "
            f"has left open; leave it out if nobody does"
        )
