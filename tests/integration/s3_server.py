"""An S3 server in this process, on a free port of loopback, that can be told to fail.

Rule: what fails is the server's answer, so that the client's own error handling is in the way too.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "runs-of-tests"
Environ = dict[str, Any]
Start = Callable[..., Any]


class Trouble:
    """Answers that are given instead of the server's own, once each, in order.

    Attributes:
        requests: method and path of each request that came.
    """

    def __init__(self, app: Callable[[Environ, Start], Any]) -> None:
        """Stand before this WSGI application."""
        self._app = app
        self._lock = threading.Lock()
        self._planned: list[tuple[str, int, str, bool]] = []
        self._lasting: tuple[str, int, str] | None = None
        self.requests: list[tuple[str, str]] = []

    def plan(self, method: str, status: int, code: str, *, after: bool = False) -> None:
        """Fail one request of this method.

        Args:
            method: such as "PUT".
            status: such as 503.
            code: such as "SlowDown".
            after: do what was asked first: the answer is what gets lost.
        """
        with self._lock:
            self._planned.append((method, status, code, after))

    def refuse_key(self, key: str, status: int = 403, code: str = "ExpiredToken") -> None:
        """Refuse every request that is signed with this access key."""
        self._lasting = (key, status, code)

    def __call__(self, environ: Environ, start: Start) -> Any:
        """Answer a request."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        signed = environ.get("HTTP_AUTHORIZATION", "")
        with self._lock:
            self.requests.append((method, path))
            planned = next((one for one in self._planned if one[0] == method), None)
            if planned is not None:
                self._planned.remove(planned)
        if self._lasting is not None and f"Credential={self._lasting[0]}/" in signed:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _refusal(environ, start, *self._lasting[1:])
        if planned is None:
            return self._app(environ, start)
        _, status, code, after = planned
        if after:
            b"".join(self._app(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        return _refusal(environ, start, status, code)


def _refusal(environ: Environ, start: Start, status: int, code: str) -> list[bytes]:
    start(f"{status} {code}", [("Content-Type", "application/xml")])
    text = f"<Error><Code>{code}</Code><Message>as planned: {code}</Message></Error>"
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text.encode()]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """Have a server with an empty bucket, and let every client of this process speak to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    trouble = Trouble(server._server.app)
    server._server.app = trouble
    url = f"http://{host}:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "first-key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    # The buckets are the process's, not the server's.
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(
        Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    trouble.requests.clear()
    try:
        yield trouble
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        client.close()
        server.stop()
