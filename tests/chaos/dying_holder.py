"""An agent whose node dies when a worker fetches rows from it, unless another one has before."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from elastic.agent import copy_server
from elastic.agent.cli import main
from elastic.runtime.copy_wire import FETCH, CopyConnection, CopyRequest
from elastic.testing.local_cluster import descendants

DEAD = "DYING_HOLDER_DEAD"
"""Names the file in which the one that dies leaves its pid."""


def die_when_asked(dead: Path) -> None:
    """From here on, the first fetch that is proven to be our cluster's is the end."""
    honest = copy_server.CopyServer._give

    def give(self: Any, line: CopyConnection, request: CopyRequest, key: str) -> None:
        if request.verb == FETCH:
            try:
                with dead.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            else:
                for pid in (*descendants(os.getpid()), os.getpid()):
                    os.kill(pid, signal.SIGKILL)
        honest(self, line, request, key)

    copy_server.CopyServer._give = give  # type: ignore[method-assign]


if __name__ == "__main__":
    die_when_asked(Path(os.environ[DEAD]))
    sys.exit(main())
