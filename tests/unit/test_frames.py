"""Frames: what a stream of bytes may look like, and how every other one is refused."""

from __future__ import annotations

import pytest

from elastic.errors import PeerError, UsageError
from elastic.wire.frames import FRAME_BYTES_MAX, FrameReader, encode_frame


def test_a_frame_is_four_bytes_of_length_and_the_payload() -> None:
    assert encode_frame(b"abc") == b"\x00\x00\x00\x03abc"


def test_several_frames_may_come_at_once() -> None:
    reader = FrameReader()
    assert reader.feed(encode_frame(b"a") + encode_frame(b"bc") + b"\x00") == [b"a", b"bc"]
    assert reader.feed(b"\x00\x00\x01d") == [b"d"]
    reader.end()


def test_the_largest_frame_passes() -> None:
    payload = bytes(FRAME_BYTES_MAX)
    reader = FrameReader()
    frame = encode_frame(payload)
    assert reader.feed(frame[: FRAME_BYTES_MAX // 2]) == []
    assert reader.feed(frame[FRAME_BYTES_MAX // 2 :]) == [payload]


@pytest.mark.parametrize("size", [0, FRAME_BYTES_MAX + 1])
def test_a_payload_that_nobody_would_read_is_not_sent(size: int) -> None:
    with pytest.raises(UsageError, match=f"a frame of {size} bytes"):
        encode_frame(bytes(size))


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"\x00\x00\x00\x00", 0),
        (b"\x02\x00\x00\x01", FRAME_BYTES_MAX + 1),
        (b"\xff\xff\xff\xff", 2**32 - 1),
        (b"Trac", 0x54726163),
    ],
)
def test_a_length_outside_the_limits_is_refused_by_number(header: bytes, length: int) -> None:
    reader = FrameReader("process 3")
    with pytest.raises(PeerError, match=f"process 3 announced a frame of {length} bytes"):
        reader.feed(header + b"more")
    with pytest.raises(PeerError, match="announced"):
        reader.feed(encode_frame(b"good again"))


def test_a_refused_length_does_not_hide_the_frames_before_it() -> None:
    reader = FrameReader()
    assert reader.feed(encode_frame(b"last words") + bytes(4)) == [b"last words"]
    with pytest.raises(PeerError, match="a frame of 0 bytes"):
        reader.end()


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_an_end_inside_a_frame_is_told(cut: int) -> None:
    reader = FrameReader("process 3")
    assert reader.feed(encode_frame(b"abc")[:cut]) == []
    with pytest.raises(PeerError, match=f"process 3 ended inside a frame, {cut} bytes"):
        reader.end()


def test_an_end_between_frames_is_none() -> None:
    reader = FrameReader()
    reader.end()
    reader.feed(encode_frame(b"abc"))
    reader.end()
