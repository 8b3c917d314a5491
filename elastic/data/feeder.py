"""The main program of one feeder: reads rows from stdin, writes batches to stdout."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from typing import Any

from elastic.data.feeders import receive, send
from elastic.data.table_reader import finish
from elastic.worker.data.seeding import seeded

POLL_S = 1.0


def main() -> None:
    """Reply to requests until the training process is gone."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Output of the user's functions goes to stderr: stdout carries the protocol.
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        path, pickled = pickle.loads(receive(source))
        sys.path[:] = path
        operations = pickle.loads(pickled)
        import torch

        torch.set_num_threads(1)
        send(sink, pickle.dumps((0, True, None)))
        while True:
            key, rows = pickle.loads(receive(source))
            send(sink, _answer(operations, key, rows))
    except (EOFError, BrokenPipeError):
        return


def _end_with(parent: int) -> None:
    """Exit when the parent process is gone, even if other processes hold its end of the pipe."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(0)


def _answer(operations: Any, key: int, rows: Any) -> bytes:
    try:
        with seeded(key):
            return pickle.dumps((key, True, finish(operations, rows)), protocol=5)
    except Exception:
        return pickle.dumps((key, False, traceback.format_exc(limit=-3)))


if __name__ == "__main__":
    main()
