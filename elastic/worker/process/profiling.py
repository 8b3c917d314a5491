"""Where this process spends its time: its stacks, sampled by a thread, for https://speedscope.app.

Rule: only Python's frames are seen, and only while Python may run: native code that holds the
interpreter's lock counts for its caller. A hundred samples a second cost about one percent.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from types import FrameType
from typing import Any

from elastic.errors import StorageError
from elastic.storage.files import Files
from elastic.worker.base.thread_frames import thread_frames

log = logging.getLogger(__name__)

EVERY_S = 0.01
SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def start_profile(run_path: str, name: str, seconds: float) -> None:
    """Sample for so long in a thread, and write what was found to RUN/name; returns at once."""
    threading.Thread(
        target=_write, args=(run_path, name, seconds), name="elastic-profile", daemon=True
    ).start()


def _write(run_path: str, name: str, seconds: float) -> None:
    data = json.dumps(sampled(seconds, name)).encode()
    try:
        Files(run_path).write(name, data)
    except StorageError as error:
        log.warning("profile_unwritten name=%s error=%r", name, str(error))


def sampled(seconds: float, name: str) -> dict[str, Any]:
    """Return the stacks of all other threads for so long, in speedscope's file format."""
    places: dict[tuple[str, str, int], int] = {}
    samples: dict[int, list[list[int]]] = defaultdict(list)
    weights: dict[int, list[float]] = defaultdict(list)
    own, began = threading.get_ident(), time.monotonic()
    then = began
    while then - began < seconds:
        time.sleep(EVERY_S)
        now = time.monotonic()
        for thread, frame in thread_frames().items():
            if thread != own:
                samples[thread].append(_stack(frame, places))
                weights[thread].append(now - then)
        then = now
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    profiles = [
        {
            "type": "sampled",
            "name": names.get(thread, str(thread)),
            "unit": "seconds",
            "startValue": 0,
            "endValue": sum(weights[thread]),
            "samples": samples[thread],
            "weights": weights[thread],
        }
        for thread in sorted(samples, key=lambda one: one != main)
    ]
    frames = [{"name": function, "file": file, "line": line} for function, file, line in places]
    return {"$schema": SCHEMA, "name": name, "shared": {"frames": frames}, "profiles": profiles}


def _stack(frame: FrameType | None, places: dict[tuple[str, str, int], int]) -> list[int]:
    """Return the numbers of a stack's functions, the outermost first."""
    found = []
    while frame is not None:
        code = frame.f_code
        place = (code.co_name, code.co_filename, code.co_firstlineno)
        found.append(places.setdefault(place, len(places)))
        frame = frame.f_back
    return found[::-1]
