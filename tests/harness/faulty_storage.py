"""Storage that fails on demand: `faulty:///path` is the local path with injected faults.

    faults = Faults(tmp_path)                     # for all paths below tmp_path
    monkeypatch.setenv("PYTHONPATH", faults.python_path())   # registers "faulty://" in workers too
    full = faults.add("full", on="write", match="*model*")
    ... run_path=f"faulty://{tmp_path}/run" ...
    faults.wait_hit(full)
    faults.remove(full)

Faults are kept in a file in that folder, so that all processes share the faults and their
counters. `elastic.storage` treats it neither as a local disk nor as an object store, but as any
other file system of fsspec.

Rule: without faults it behaves as the local disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

PROTOCOL = "faulty"
CONTROL = ".faults.json"
POLL_S = 0.01
TIMEOUT_S = 30.0
HANG_S_MAX = 120.0
"""A hang ends after so many seconds, so that none outlives its test run."""
OPERATIONS = ("any", "read", "write", "list", "delete")
ERRNOS = {
    "full": errno.ENOSPC,
    "io": errno.EIO,
    "timeout": errno.ETIMEDOUT,
    "stale": errno.ESTALE,
    "denied": errno.EACCES,
}
KINDS = (*ERRNOS, "hang", "slow", "torn")


class Faults:
    """The faults of all paths below one folder; any process may change and read them."""

    def __init__(self, folder: str | Path) -> None:
        """Use a folder's faults; a new folder has none.

        Args:
            folder: an existing folder; faults apply to `faulty://` paths below it.
        """
        self.folder = Path(folder)
        self._control = self.folder / CONTROL
        if not self._control.exists():
            self._control.write_text('{"next": 1, "rules": {}, "healed": []}')

    def add(
        self, kind: str, *, on: str = "any", match: str = "*", times: int = -1, seconds: float = 0.1
    ) -> str:
        """Add a fault.

        Args:
            kind: "full", "io", "timeout", "stale", "denied" raise; "hang" waits until removed;
                "slow" takes `seconds` longer; "torn" silently writes half of a file.
            on: "read" (content and existence), "write", "list", "delete", "any".
            match: glob for the whole path; wildcards match slashes too.
            times: number of hits, -1 until removed.
            seconds: delay of "slow".

        Returns:
            The fault's name, for the other methods.

        Raises:
            ValueError: unknown kind or operation.
        """
        if kind not in KINDS or on not in OPERATIONS:
            raise ValueError(f"kind={kind!r} on={on!r}: expected one of {KINDS}, {OPERATIONS}")
        rule = {
            "kind": kind, "on": on, "match": match, "left": times, "seconds": seconds, "hits": 0,
        }  # fmt: skip
        with self._locked() as state:
            name = str(state["next"])
            state["next"] += 1
            state["rules"][name] = rule
        return name

    def remove(self, name: str = "") -> None:
        """Remove one fault, or all for ""; operations that hang in it continue."""
        with self._locked() as state:
            for rule in [name] if name else list(state["rules"]):
                state["rules"][rule]["left"] = 0
                state["healed"].append(rule)

    def hits(self, name: str) -> int:
        """Return how often a fault was hit."""
        with self._locked() as state:
            return int(state["rules"][name]["hits"])

    def wait_hit(self, name: str, count: int = 1) -> None:
        """Wait until a fault was hit `count` times.

        Raises:
            TimeoutError: it was not, within TIMEOUT_S.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while (hits := self.hits(name)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fault {name} was met {hits} times, waited for {count}")
            time.sleep(POLL_S)

    def python_path(self) -> str:
        """Return a PYTHONPATH that registers `faulty://` in child processes.

        fsspec finds file systems by the entry points of installed packages: this creates one.
        """
        package = self.folder / ".faulty" / "elastic_faulty-1.dist-info"
        package.mkdir(parents=True, exist_ok=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: elastic-faulty\nVersion: 1")
        target = f"{__name__}:{FaultyFileSystem.__name__}"
        (package / "entry_points.txt").write_text(f"[fsspec.specs]\n{PROTOCOL} = {target}\n")
        root = Path(__file__).resolve().parents[2]
        return os.pathsep.join([str(root), str(package.parent)])

    def synchronize(self, operation: str, path: str) -> bool:
        """Apply the faults that match an operation; return whether to tear its file.

        Raises:
            OSError: a matching fault raises it.
        """
        torn = False
        for name, rule in self._hit(operation, path):
            kind = rule["kind"]
            if kind in ERRNOS:
                raise OSError(ERRNOS[kind], os.strerror(ERRNOS[kind]), path)
            if kind == "hang":
                self._wait_removed(name)
            elif kind == "slow":
                time.sleep(rule["seconds"])
            else:
                torn = True
        return torn

    def _hit(self, operation: str, path: str) -> list[tuple[str, dict[str, Any]]]:
        with self._locked() as state:
            met = []
            for name, rule in state["rules"].items():
                fits = rule["on"] in ("any", operation) and fnmatch.fnmatchcase(path, rule["match"])
                if fits and rule["left"] and (rule["kind"] != "torn" or operation == "write"):
                    rule["left"] -= rule["left"] > 0
                    rule["hits"] += 1
                    met.append((name, rule))
            return met

    def _wait_removed(self, name: str) -> None:
        deadline = time.monotonic() + HANG_S_MAX
        while time.monotonic() < deadline:
            with self._locked() as state:
                if name in state["healed"]:
                    return
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        with open(self._control, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            before = json.dumps(state)
            yield state
            after = json.dumps(state)
            if after != before:
                file.seek(0)
                file.truncate()
                file.write(after)


def faults_of(path: str) -> Faults | None:
    """Return the faults that apply to a path: those of the nearest parent folder that has any."""
    for folder in Path(path).parents:
        if (folder / CONTROL).exists():
            return Faults(folder)
    return None


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The fsspec file system for `faulty://`."""

    protocol = PROTOCOL
    root_marker = "/"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Wrap the local disk."""
        super().__init__(*args, **kwargs)
        self._disk = LocalFileSystem(auto_mkdir=False)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix(f"{PROTOCOL}://").rstrip("/") or "/"

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        """List a folder."""
        path = self._meet("list", path)
        return self._disk.ls(path, detail=detail)

    def info(self, path: str, **_: Any) -> Any:
        """Describe a file or folder."""
        return self._disk.info(self._meet("read", path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Read a file."""
        return bytes(self._disk.cat_file(self._meet("read", path), start, end))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        self._disk.makedirs(self._meet("write", path), exist_ok=exist_ok)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Make a folder."""
        self._disk.mkdir(self._meet("write", path), create_parents=create_parents)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Rename a file."""
        os.replace(self._strip_protocol(path1), self._meet("write", path2))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or a folder with all that is in it."""
        self._disk.rm(self._meet("delete", path), recursive=recursive, maxdepth=maxdepth)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._disk.rm_file(self._meet("delete", path))

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        """Open a file."""
        path = self._strip_protocol(path)
        if "r" in mode:
            return open(self._meet("read", path), mode)
        faults = faults_of(path)
        return _FaultyOutput(path, mode, faults)

    def _meet(self, operation: str, path: str) -> str:
        path = str(self._strip_protocol(path))
        if (faults := faults_of(path)) is not None:
            faults.synchronize(operation, path)
        return path


class _FaultyOutput:
    """An open output file: faults apply to each write, since a disk may fill up at any."""

    def __init__(self, path: str, mode: str, faults: Faults | None) -> None:
        self._path = path
        self._faults = faults
        self._torn = False
        self._meet()
        self._file = open(path, mode)  # noqa: SIM115 - `close` does.

    def write(self, data: Any) -> int:
        self._meet()
        view = memoryview(data).cast("B")
        self._file.write(view[: len(view) // 2] if self._torn else view)
        return len(view)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _FaultyOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meet(self) -> None:
        if self._faults is not None:
            self._torn = self._faults.synchronize("write", self._path) or self._torn


fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
