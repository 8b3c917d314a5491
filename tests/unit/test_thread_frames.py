from __future__ import annotations

import gc
import sys
import threading

import pytest

from elastic.worker.base.thread_frames import thread_frames


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_the_interpreter_is_locked(
    monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    frames, enabled_inside = sys._current_frames, []

    def current_frames() -> object:
        enabled_inside.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    (gc.enable if is_enabled else gc.disable)()
    try:
        found = thread_frames()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert enabled_inside == [False]
    assert threading.get_ident() in found
