"""Checkpoints that torch writes in the background, beside the script's collectives.

`torch.distributed.checkpoint.async_save` calls collectives in a thread of its own. If the script
calls some in the same group meanwhile, or the save before is not done, each rank begins them in
another order: gloo then waits for ever, or ends the process.

Rule: a save begins once the one before is done, in a group that nothing else uses.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class BackgroundSaves:
    """Stands where `async_save` is called; for the main thread, of all ranks."""

    def __init__(self) -> None:
        """Have no group yet: most scripts need none."""
        self._last: concurrent.futures.Future[Any] | None = None
        self._group: Any = None

    def begin(self, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Begin a save, as torch's own (`real`) does, whose arguments it takes."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
        alone = named.get("no_dist") or not dist.is_initialized()
        if not alone and named.get("process_group") is None:
            self._group = self._group or dist.new_group(backend="gloo")
            named["process_group"] = self._group
        answer = real(*args, **named)
        self._last = getattr(answer, "upload_completion", answer)
        return answer

    def forget(self) -> None:
        self._last = self._group = None
