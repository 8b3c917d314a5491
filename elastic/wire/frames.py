"""Frames on the worker's pipe: four bytes of length, big endian, then that many bytes.

Rule: a length outside 1 to `FRAME_BYTES_MAX` is refused before anything is kept for it, so that a
process that writes nonsense costs no memory.
"""

from __future__ import annotations

import struct

from elastic.errors import PeerError, UsageError

FRAME_BYTES_MAX = 32 * 1024 * 1024
"""Longest payload of one frame."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: bytes) -> bytes:
    """Return a payload with its length before it.

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
    """Cuts a stream of bytes, which comes in pieces of any size, into payloads.

    Args:
        who: whose stream it is, for errors.
    """

    def __init__(self, who: str = "the peer") -> None:
        self._who = who
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete with these bytes, none if more must come.

        Raises:
            PeerError: the next length is refused, and all that follows cannot be read. Payloads
                before it were returned by this call or an earlier one: an error never hides them.
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
        """Say that the stream is over.

        Raises:
            PeerError: it ended inside a frame, or what is left of it cannot be read.
        """
        left = len(self._buffer)
        # A refused length that came with good payloads is still here, and says so now.
        self.feed(b"")
        if left:
            raise PeerError(
                f"{self._who} ended inside a frame, {left} bytes of it came; its last message is "
                f"lost"
            )
