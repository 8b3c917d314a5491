"""Small JSON files that carry a format and a checksum of their own: markers, findings.

Rule: what is read is what was written, in the format that the reader knows, or it is refused.
"""

from __future__ import annotations

import json
import zlib
from typing import Any


def to_summed_json(body: dict[str, Any], file_format: int) -> str:
    """Return the text of a file that says its format and its checksum."""
    body = {"format": file_format, **body}
    return json.dumps({**body, "crc32": _checksum(body)}, indent=1)


def from_summed_json(text: str, file_format: int) -> dict[str, Any]:
    """Return what `to_summed_json` was given.

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
