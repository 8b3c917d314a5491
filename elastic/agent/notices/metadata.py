"""One bounded HTTP query to a cloud's metadata server.

Rule: a query has one timeout in total, a reply has a maximum size, a redirect is not followed, and
every failure is `None`: a faulty server cannot harm the agent. The standard library's HTTP client
blocks a thread, which would keep the agent from exiting; so the bytes go over asyncio, and the
library only parses them.
"""

from __future__ import annotations

import http.client
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import anyio

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 64 * 1024
TIMEOUT_S = 3.0


@dataclass(frozen=True)
class MetadataAnswer:
    """A reply of any status, with its text, and headers by lower-case name."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MetadataEndpoint:
    """A metadata server."""

    host: str
    port: int = 80

    @classmethod
    def parse(cls, text: str, default: str) -> MetadataEndpoint:
        """Parse "host", "host:port" or "http://host:port"; "" and invalid text give the default."""
        for given in (text, default):
            try:
                parts = urlsplit(given if "://" in given else f"http://{given}")
                if parts.hostname:
                    return cls(parts.hostname, parts.port or 80)
            except ValueError:
                log.warning("metadata_server_ignored address=%r", given)
        return cls("169.254.169.254")

    async def request(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> MetadataAnswer | None:
        """Return the reply, None if there is none in time, or it is no valid HTTP."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if method != "GET":
            lines.append("Content-Length: 0")
        request = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii", "replace")
        try:
            with anyio.fail_after(timeout_s):
                stream = await anyio.connect_tcp(self.host, self.port)
                async with stream:
                    await stream.send(request)
                    return await _read(stream, method)
        except (OSError, TimeoutError, http.client.HTTPException, anyio.BrokenResourceError) as e:
            log.debug("metadata_server_silent path=%s error=%r", path, str(e))
            return None


async def _read(stream: anyio.abc.ByteStream, method: str) -> MetadataAnswer | None:
    """Read until the reply is complete, the server closes, or the maximum size is exceeded."""
    data = b""
    is_over = False
    while True:
        answer = _parse(data, method, is_over=is_over)
        if answer is not None or is_over:
            return answer
        try:
            data += await stream.receive(ANSWER_BYTES_MAX)
        except anyio.EndOfStream:
            is_over = True
        if len(data) > ANSWER_BYTES_MAX:
            return None


class _Bytes:
    """Stands in for a socket: the library's parser only calls `makefile`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        del mode
        return io.BytesIO(self._data)


def _parse(data: bytes, method: str, *, is_over: bool) -> MetadataAnswer | None:
    """Return the reply if it is complete, None otherwise.

    Raises:
        http.client.HTTPException: it is no HTTP; more data would not help.
    """
    if b"\r\n\r\n" not in data and b"\n\n" not in data:
        return None
    response = http.client.HTTPResponse(cast("Any", _Bytes(data)), method=method)
    response.begin()
    has_length = response.length is not None or response.chunked
    if not has_length and not is_over:
        return None
    try:
        body = response.read()
    except http.client.IncompleteRead:
        return None
    headers = {name.lower(): value for name, value in response.getheaders()}
    return MetadataAnswer(response.status, body.decode("utf-8", "replace"), headers)
