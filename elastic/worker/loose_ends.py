"""What a script has left in its process when it returns, and when it is run again.

Rule: a script ends as it would in a process of its own: its threads and the work in its executors
are waited for, and what it registered with `atexit` has the time that it takes. Only then was it a
success: a checkpoint that a thread still writes belongs to it. The library's own threads, whose
names begin with "elastic-", are none of a script's.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

OURS = "elastic-"
OUR_PACKAGE = "elastic"
LOOK_S = 0.02
INSTALLED = ("site-packages", "dist-packages")


def end_script(known: Iterable[threading.Thread]) -> None:
    """Do what Python does at the end of a process, for a script that has returned.

    Args:
        known: threads that were there before it.
    """
    _wait_for_threads(frozenset(known))
    atexit._run_exitfuncs()


def _wait_for_threads(known: frozenset[threading.Thread]) -> None:
    executors = [one for one in gc.get_objects() if issubclass(type(one), Executor)]
    while any(_is_busy(one) for one in executors):
        time.sleep(LOOK_S)
    # Those of executors wait for more work, and end with the process.
    idle = {thread for one in executors for thread in _threads_of(one)}
    for thread in threading.enumerate():
        is_own = thread is threading.current_thread() or thread.name.startswith(OURS)
        if not (thread.daemon or is_own or thread in known or thread in idle):
            thread.join()


def _is_busy(executor: Executor) -> bool:
    """Return whether an executor of the standard library has work; others wait for themselves."""
    if getattr(executor, "_thread_name_prefix", "").startswith(OURS):
        return False
    if getattr(executor, "_pending_work_items", None):  # Of processes.
        return True
    threads, idle = getattr(executor, "_threads", ()), getattr(executor, "_idle_semaphore", None)
    return idle is not None and len(threads) > idle._value


def _threads_of(executor: Executor) -> set[threading.Thread]:
    feeder = getattr(executor, "_executor_manager_thread", None)
    return {*getattr(executor, "_threads", ()), *([feeder] if feeder is not None else [])}


def is_of_script(name: str, places: Iterable[str | None], folders: Iterable[str]) -> bool:
    """Return whether a module belongs to a script, and is not installed.

    Args:
        name: of the module.
        places: its file, or the folders of a package without one.
        folders: of the script, and where it finds its modules.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in (OUR_PACKAGE, "__main__"):
        return False
    paths = [Path(place) for place in places if place is not None]
    if any(path.suffix not in ("", ".py") for path in paths):
        return False  # Of an extension there is one in a process.
    inside = [p for p in paths if not set(INSTALLED).intersection(p.parts)]
    return any(path.is_relative_to(folder) for path in inside for folder in folders)


def forget_modules(known: frozenset[str], folders: Sequence[str]) -> None:
    """Have a script that is run again import its own modules anew.

    They may remember the rank or the size of a group that is over. Installed packages stay.

    Args:
        known: modules that were there before it.
        folders: as for `is_of_script`.
    """
    for name, module in list(sys.modules.items()):
        if name in known:
            continue
        place = getattr(module, "__file__", None)
        places = [place] if place is not None else [*getattr(module, "__path__", ())]
        if is_of_script(name, places, folders):
            del sys.modules[name]
