"""Frames on the worker's pipe: a length of four bytes, big endian, then that many bytes.

Rule: a length outside 1 to `FRAME_BYTES_MAX` is rejected before any payload is buffered, so that a
process that writes garbage costs no memory.
"""

from __future__ import annotations

import struct

from elastic.errors import PeerError, UsageError

FRAME_BYTES_MAX = 32 * 1024 * 1024
"""Limit of one frame's payload."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: bytes) -> bytes:
    """Return a payload prefixed with its length.

    Raises:
        UsageError: the payload is empty or longer than `FRAME_BYTES_MAX`.
    """
    if not 1 <= len(payload) <= FRAME_BYTES_MAX:
        raise UsageError(
            f"a frame of {len(payload)} bytes cannot be sent: expected 1 to {FRAME_BYTES_MAX}; "
            f"pass large data through a file"
        )
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream, which arrives in pieces of any size, into payloads.

    Args:
        who: name of the sender, for errors.
    """

    def __init__(self, who: str = "the peer") -> None:
        self._who = who
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that these bytes complete, which may be none.

        Raises:
            PeerError: the next length is invalid, so nothing after it can be read. Raised only
                once all payloads before it were returned.
        """
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if not 1 <= length <= FRAME_BYTES_MAX:
                if payloads:
                    break
                raise PeerError(
                    f"{self._who} announced a frame of {length} bytes: expected 1 to "
                    f"{FRAME_BYTES_MAX}; something else writes to this pipe, end the process"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads

    def end(self) -> None:
        """Check the remaining bytes at the end of the stream.

        Raises:
            PeerError: the stream ended inside a frame, or the remaining bytes cannot be read.
        """
        left = len(self._buffer)
        # An invalid length that came after valid payloads is still buffered: it raises now.
        self.feed(b"")
        if left:
            raise PeerError(
                f"{self._who} ended inside a frame, {left} bytes of it came; its last message is "
                f"lost"
            )
