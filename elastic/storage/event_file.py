"""TensorBoard's event files: scalars, one record each, written without TensorBoard.

A record is eight bytes of length, their masked CRC-32C, the event, and its masked CRC-32C
(TFRecord). An event is a protobuf of time, step and a summary of names and values; the few fields
needed here are encoded by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping


def first_record(unix_s: float) -> bytes:
    return _record(_double(1, unix_s) + _bytes(3, b"brain.Event:2"))


def scalars(unix_s: float, step: int, values: Mapping[str, float]) -> bytes:
    summary = b"".join(
        _bytes(1, _bytes(1, name.encode("utf-8", "replace")) + _float(2, value))
        for name, value in values.items()
    )
    return _record(_double(1, unix_s) + _varint(2, step) + _bytes(5, summary))


def _record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + _masked(head) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    """Return the table of CRC-32C (Castagnoli), reflected."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return _number(field << 3 | 5) + struct.pack("<f", value)
    except OverflowError:
        return _number(field << 3 | 5) + struct.pack(
            "<f", float("inf") if value > 0 else -float("inf")
        )


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value
