"""Small JSON files with a format number and a checksum of themselves: markers, findings.

Rule: a file that differs from what was written, or has another format, is refused.
"""

from __future__ import annotations

import json
import zlib
from typing import Any


def to_summed_json(body: dict[str, Any], file_format: int) -> str:
    """Return the text of a file with its format and checksum."""
    body = {"format": file_format, **body}
    return json.dumps({**body, "crc32": _checksum(body)}, indent=1)


def from_summed_json(text: str, file_format: int) -> dict[str, Any]:
    """Return the object that was passed to `to_summed_json`.

    Raises:
        ValueError: the text is torn, changed, or of another format.
    """
    body: Any = json.loads(text)
    if not isinstance(body, dict) or body.get("format") != file_format:
        raise ValueError(f"expected an object with format {file_format}")
    if body.pop("crc32", None) != _checksum(body):
        raise ValueError("its checksum does not fit")
    del body["format"]
    return body


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
