"""One bounded question to a cloud's metadata server.

Rule: a question has one deadline over all of it, an answer has a largest size, a redirect is not
followed, and every failure is `None`: there is nothing that this server could do to its asker.
The standard library's HTTP client blocks a thread, which would keep the agent from ending; so the
bytes go over asyncio, and only the parsing is the library's.
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
    """What the server said: text of any status, and headers by lower-case name."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MetadataEndpoint:
    """A metadata server.

    Attributes:
        host, port: where it listens.
    """

    host: str
    port: int = 80

    @classmethod
    def parse(cls, text: str, default: str) -> MetadataEndpoint:
        """Read "host", "host:port" or "http://host:port"; "" and nonsense give the default."""
        for given in (text, default):
            try:
                parts = urlsplit(given if "://" in given else f"http://{given}")
                if parts.hostname:
                    return cls(parts.hostname, parts.port or 80)
            except ValueError:
                log.warning("metadata_server_ignored address=%r", given)
        return cls("169.254.169.254")

    async def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> MetadataAnswer | None:
        """Return the answer, None if there is none in time, or none that is HTTP."""
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
    """Read until the answer is whole, the server hangs up, or it has said too much."""
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
    """Bytes in the place of a socket, which is all that the library's parser wants of one."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        """Return the bytes as a file."""
        del mode
        return io.BytesIO(self._data)


def _parse(data: bytes, method: str, *, is_over: bool) -> MetadataAnswer | None:
    """Return the answer if all of it is here, None otherwise.

    Raises:
        http.client.HTTPException: it is no HTTP, however much more of it comes.
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
