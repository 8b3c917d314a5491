"""One validation as a child process of this worker: started, watched, killed.

Rule: what it is to do is handed over in anonymous memory, and so is what it found out: no name, no
port, and nothing that a full pipe could block. Its output is this worker's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from elastic.core.facts import CheckpointStatus
from elastic.storage.validation import ValidationFinding
from elastic.worker.base.children import kill

FOUND_BYTES_MAX = 1024 * 1024
"""As much as a report may have; both go into one record of the coordinator."""
MODULE = "elastic.worker.process.validation_process"


@dataclass(frozen=True)
class ValidationExit:
    """How a validation ended.

    Attributes:
        finding: what to write down of it.
        is_final: False if its process died without a word, which another may not.
    """

    finding: ValidationFinding
    is_final: bool = True


class ValidationChild:
    """A validation at work.

    Attributes:
        pidfd: readable once it has ended.
        deadline: on the monotonic clock, None for none.
    """

    def __init__(
        self,
        call: Callable[[str, dict[str, Any]], str],
        path: str,
        fn_kwargs: dict[str, Any],
        timeout_s: float | None,
    ) -> None:
        """Start it; the thread that does so must outlive it, or the kernel kills it.

        Args:
            call: takes path and keywords, returns metrics as JSON.
            path: of the checkpoint.
            fn_kwargs: for the user's function.
            timeout_s: how long it may take, None for as long as it does.

        Raises:
            Exception: whatever pickling raises, or an OSError.
        """
        order = {
            "sys_path": list(sys.path),
            "threads": torch.get_num_threads(),
            "call": cloudpickle.dumps((call, path, fn_kwargs)),
        }
        self._timeout_s = timeout_s
        task = _memory("elastic-validation", cloudpickle.dumps(order))
        self._found = _memory("elastic-validated", b"")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), str(self._found)],
                stdin=task,
                pass_fds=(self._found,),
            )
        except BaseException:
            os.close(self._found)
            raise
        finally:
            os.close(task)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def ended(self) -> ValidationExit | None:
        """Return how it ended, None while it runs; one that takes too long is killed."""
        code = self._process.poll()
        if code is None:
            if self.deadline is None or time.monotonic() < self.deadline:
                return None
            self.kill()
            reason = f"it took longer than {self._timeout_s:g} s"
            return ValidationExit(
                ValidationFinding(CheckpointStatus.VALIDATION_TIMEOUT, reason=reason)
            )
        size = os.fstat(self._found).st_size
        text = os.pread(self._found, FOUND_BYTES_MAX, 0)
        self.kill()
        failed = CheckpointStatus.VALIDATION_FAILED
        if size > FOUND_BYTES_MAX:
            what = f"what it returned has {size} bytes as JSON, at most {FOUND_BYTES_MAX} are kept"
            return ValidationExit(
                ValidationFinding(failed, reason=f"{what}: write large data elsewhere")
            )
        try:
            found = json.loads(text)
            if "error" in found:
                return ValidationExit(ValidationFinding(failed, reason=str(found["error"])))
            return ValidationExit(
                ValidationFinding(CheckpointStatus.VALIDATED, dict(found["metrics"]))
            )
        except (ValueError, KeyError, TypeError):
            how = f"signal {_name_of(-code)}" if code < 0 else f"exit code {code}"
            return ValidationExit(
                ValidationFinding(failed, reason=f"its process ended by {how}"), code >= 0
            )

    def kill(self) -> None:
        """End it and all that it started, and release it."""
        if self.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        kill(self._process)  # It may have no group of its own yet.
        for number in (self.pidfd, self._found):
            os.close(number)
        self.pidfd = -1


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)  # Real-time signals have numbers only.


def _memory(name: str, content: bytes) -> int:
    """Return a descriptor of anonymous memory with this content, to be read from its beginning."""
    number = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(number, view) :]
        os.lseek(number, 0, os.SEEK_SET)
    except BaseException:
        os.close(number)
        raise
    return number
