"""Frames: what a stream of bytes may look like, and how every other one is refused."""

from __future__ import annotations

import pytest

from elastic.errors import UsageError
from elastic.wire.frames import FRAME_BYTES_MAX, encode_frame


@pytest.mark.parametrize("size", [0, FRAME_BYTES_MAX + 1])
def test_a_payload_that_nobody_would_read_is_not_sent(size: int) -> None:
    with pytest.raises(UsageError, match=f"a frame of {size} bytes"):
        encode_frame(bytes(size))
