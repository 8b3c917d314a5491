"""What a script has left in its process when it returns, and when it is run again.

Rule: a script ends as it would in a process of its own: its threads and the work in its executors
are waited for, and what it registered with `atexit` has the time that it takes. Only then was it a
success: a checkpoint that a thread still writes belongs to it. The process lives on, though, and
may run it again: what others registered stays for the process's own end. The library's threads,
whose names begin with "elastic-", are none of a script's, nor is what an earlier run left behind.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from elastic.worker.interrupt import GroupChanged

log = logging.getLogger(__name__)

OURS = "elastic-"
LOOK_S = 0.02
INSTALLED = ("site-packages", "dist-packages")
SHARED = frozenset({*sys.stdlib_module_names, "torch", "elastic"})
"""Packages whose modules register for the whole process; a script's own are never among them."""
OTHERS_THREADS = frozenset({"torch", "elastic", "concurrent", "multiprocessing", "logging"})
"""Packages whose threads do no harm when they stay: they wait for work, and hold nothing else."""


class Run:
    """One run of a script: what it must be waited for.

    Attributes:
        goodbyes: what it has registered with `atexit`.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        """Note what is there before.

        Args:
            folders: of the script, and where it finds its modules.
        """
        self._folders = folders
        self._threads = frozenset(threading.enumerate())
        self._busy = weakref.WeakSet(one for one in _executors() if _is_busy(one))
        self.goodbyes: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def end(self) -> None:
        """Do what Python does at the end of a process, for a script that has returned."""
        pools_of_it = [one for one in _executors() if one not in self._busy]
        idle_looks = 0
        while idle_looks < 2:  # A thread may have taken its work, and not begun it.
            idle_looks = 0 if any(_is_busy(one) for one in pools_of_it) else idle_looks + 1
            if pools_of_it:
                time.sleep(LOOK_S)
        # Those of executors wait for more work, and end with the process.
        idle = {thread for one in _executors() for thread in _threads_of(one)}
        while left := [thread for thread in threading.enumerate() if self._is_own(thread, idle)]:
            for thread in left:
                thread.join()
        while self.goodbyes:
            function, args, kwargs = self.goodbyes.pop()
            atexit.unregister(function)
            try:
                function(*args, **kwargs)
            except Exception:
                sys.excepthook(*sys.exc_info())

    def forget(self) -> None:
        """It is run again, and registers anew."""
        for function, _, _ in self.goodbyes:
            atexit.unregister(function)
        self.goodbyes.clear()

    def note(self, caller: FrameType, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Something was registered with `atexit`."""
        name = str(caller.f_globals.get("__name__", ""))
        place = caller.f_globals.get("__file__")
        is_import = caller.f_code.co_name == "<module>"
        if is_import and not is_of_script(name, [place], self._folders):
            return
        if name.partition(".")[0] not in SHARED:
            self.goodbyes.append((function, args, kwargs))

    def _is_own(self, thread: threading.Thread, idle: set[threading.Thread]) -> bool:
        is_ours = thread is threading.current_thread() or thread.name.startswith(OURS)
        return not (thread.daemon or is_ours or thread in self._threads or thread in idle)


@contextmanager
def watching(folders: Sequence[str]) -> Iterator[Run]:
    """Watch one run of a script, for the length of a `with` block."""
    run, register, unregister = Run(folders), atexit.register, atexit.unregister

    def noted(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        run.note(sys._getframe(1), function, args, kwargs)
        return register(function, *args, **kwargs)

    def forgotten(function: Callable[..., Any], /) -> None:
        run.goodbyes[:] = [one for one in run.goodbyes if one[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = noted, forgotten  # type: ignore[assignment]
    try:
        yield run
    except GroupChanged:
        run.forget()
        raise
    finally:
        atexit.register, atexit.unregister = register, unregister


def _executors() -> list[Executor]:
    kinds = (ThreadPoolExecutor, ProcessPoolExecutor)
    found = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    return [one for one in found if not getattr(one, "_thread_name_prefix", "").startswith(OURS)]


def _is_busy(executor: Executor) -> bool:
    """Return whether it has work; what it says of idle threads itself counts some twice."""
    if getattr(executor, "_pending_work_items", None):  # Of processes.
        return True
    threads = [thread for thread in getattr(executor, "_threads", None) or () if thread.is_alive()]
    work = getattr(executor, "_work_queue", None)
    if not threads or work is None:
        return False
    if not work.empty():
        return True
    frames = sys._current_frames()
    tops = [frames.get(thread.ident) for thread in threads]
    return any(top is not None and top.f_code is not pools._worker.__code__ for top in tops)


def _threads_of(executor: Executor) -> set[threading.Thread]:
    feeder = getattr(executor, "_executor_manager_thread", None)
    return {*(getattr(executor, "_threads", None) or ()), *([feeder] if feeder else [])}


def is_of_script(name: str, places: Iterable[str | None], folders: Iterable[str]) -> bool:
    """Return whether a module belongs to a script, and is not installed.

    Args:
        name: of the module.
        places: its file, or the folders of a package without one.
        folders: of the script, and where it finds its modules.
    """
    if name.partition(".")[0] in SHARED:
        return False
    paths = [Path(place) for place in places if place is not None]
    if any(path.suffix not in ("", ".py") for path in paths):
        return False  # Of an extension there is one in a process.
    inside = [p for p in paths if not set(INSTALLED).intersection(p.parts)]
    return any(path.is_relative_to(folder) for path in inside for folder in folders)


class LeftThreads:
    """Threads of a script's that live on when it is run again: with its ports, files and locks."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Note the threads that are there before its first run.

        Args:
            folders: as for `is_of_script`.
        """
        self._folders = folders
        self._known = weakref.WeakSet(threading.enumerate())

    def tell(self) -> None:
        """Log one warning that names those that are there now, each once."""
        left = [one for one in threading.enumerate() if self._is_news(one)]
        self._known.update(left)
        if left:
            log.warning(
                "threads_left names=%s: the script is run again in this process, in which these "
                "threads of its last run go on and keep what they hold, such as ports and files; "
                "have them end when the script is left, or use elastic run --fresh-process",
                ",".join(repr(one.name) for one in left),
            )

    def _is_news(self, thread: threading.Thread) -> bool:
        if thread in self._known or thread is threading.current_thread():
            return False
        if thread.name.startswith(OURS):
            return False
        kind = type(thread)
        runs = getattr(thread, "_target", None) if kind is threading.Thread else kind.run
        name = str(getattr(runs, "__module__", None) or kind.__module__)
        top = name.partition(".")[0]
        if top in OTHERS_THREADS:
            return False
        # What the standard library runs is run for somebody: a server's loop, a timer.
        code = getattr(runs, "__code__", None)
        places = [code.co_filename] if code is not None else []
        return top in sys.stdlib_module_names or is_of_script(name, places, self._folders)


def forget_modules(known: frozenset[str], folders: Sequence[str]) -> None:
    """Have a script that is run again import its own modules anew.

    They may remember the rank or the size of a group that is over. Installed packages stay, and
    those that have compiled parts, which know the classes of the others.

    Args:
        known: modules that were there before it.
        folders: as for `is_of_script`.
    """
    fresh = {name: module for name, module in list(sys.modules.items()) if name not in known}
    files = {name: getattr(module, "__file__", None) for name, module in fresh.items()}
    parts = {name for name, file in files.items() if file and Path(file).suffix != ".py"}
    compiled = {name.partition(".")[0] for name in parts}
    for name, module in fresh.items():
        place = files[name]
        places = [place] if place is not None else [*getattr(module, "__path__", ())]
        if name.partition(".")[0] not in compiled and is_of_script(name, places, folders):
            del sys.modules[name]
