"""A cloud's metadata server on loopback: speaks the protocols of three clouds, and misbehaves.

Rule: what is served is what the clouds' documentation says, and is only changed by a test.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from elastic.agent.notices.metadata import MetadataEndpoint

TOKEN = "AQAEALx-token=="
HELD_S = 30.0


class Cloud:
    """What the machine's cloud thinks of it.

    Attributes:
        action: AWS: text of spot/instance-action, "" for 404.
        rebalance: AWS: text of the recommendation, "" for 404.
        values: GCP: by key.
        events: Azure.
        machine: Azure: this machine's name.
        mood: how the server behaves: "", "500", "redirect", "garbage", "portal" (yes to
            all), "hang", "drip", "endless".
        asked: path of every request so far.
    """

    def __init__(self) -> None:
        self.action = self.rebalance = ""
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.events: list[dict[str, Any]] = []
        self.machine = "vm-7"
        self.mood = ""
        self.asked: list[str] = []
        self.token = TOKEN
        self.changed = threading.Condition()
        self.is_over = False

    def set_value(self, key: str, value: str) -> None:
        """Change a value of GCP; whoever waits for it is answered."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def set_mood(self, mood: str) -> None:
        """Behave so from now on; requests that hang are let go."""
        with self.changed:
            self.mood = mood
            self.changed.notify_all()

    def wait_for_requests(self, count: int, path: str = "", in_all: bool = False) -> None:
        """Wait until so many more requests came, or so many in all."""
        deadline = time.monotonic() + 60
        with self.changed:
            until = count if in_all else self._count(path) + count
            while self._count(path) < until:
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"{self._count(path)} of {until} requests for {path!r} came"
                self.changed.wait(left_s)

    def _count(self, path: str) -> int:
        return sum(path in each for each in self.asked)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    cloud: Cloud

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        cloud = self.cloud
        with cloud.changed:
            cloud.asked.append(f"{self.command} {self.path}")
            cloud.changed.notify_all()
        with contextlib.suppress(OSError):
            if not self._misbehave(cloud.mood):
                self._answer(*self._page(urlsplit(self.path)))

    def _misbehave(self, mood: str) -> bool:
        if mood == "500":
            self._answer(500, "internal error", {})
        elif mood == "redirect":
            self._answer(302, "", {"Location": f"http://127.0.0.1:9{self.path}"})
        elif mood == "garbage":
            self.wfile.write(b"\x00\xff not http at all\r\n\r\n" * 10)
            self.close_connection = True
        elif mood == "portal":
            self._answer(200, "TRUE", {})
        elif mood == "hang":
            with self.cloud.changed:
                self.cloud.changed.wait_for(
                    lambda: self.cloud.mood != "hang" or self.cloud.is_over, HELD_S
                )
            self.close_connection = True
        elif mood in ("drip", "endless"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n")
            while self.cloud.mood == mood and not self.cloud.is_over:
                self.wfile.write(b"x" * (1 if mood == "drip" else 65536))
                if mood == "drip":
                    with self.cloud.changed:
                        self.cloud.changed.wait(0.1)
            self.close_connection = True
        else:
            return False
        return True

    def _page(self, url: Any) -> tuple[int, str, dict[str, str]]:
        if url.path.startswith("/latest/"):
            return self._aws(url.path)
        if url.path.startswith("/computeMetadata/v1/instance/"):
            return self._gcp(url.path.rpartition("/")[2], parse_qs(url.query))
        if url.path.startswith("/metadata/"):
            return self._azure(url)
        return 404, "", {}

    def _aws(self, path: str) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            is_asked_well = self.command == "PUT" and self.headers.get(
                "X-aws-ec2-metadata-token-ttl-seconds", ""
            )
            return (200, self.cloud.token, {}) if is_asked_well else (400, "", {})
        if self.headers.get("X-aws-ec2-metadata-token") != self.cloud.token:
            return 401, "", {}
        text = {
            "/latest/meta-data/spot/instance-action": self.cloud.action,
            "/latest/meta-data/events/recommendations/rebalance": self.cloud.rebalance,
        }.get(path, "")
        return (200, text, {}) if text else (404, "Not Found", {})

    def _gcp(self, key: str, query: dict[str, list[str]]) -> tuple[int, str, dict[str, str]]:
        if self.headers.get("Metadata-Flavor") != "Google":
            return 403, "", {}
        cloud = self.cloud
        if "wait_for_change" in query:
            held_s = min(HELD_S, float(query["timeout_sec"][0]))
            with cloud.changed:
                cloud.changed.wait_for(
                    lambda: (
                        etag(cloud.values[key]) != query["last_etag"][0]
                        or cloud.is_over
                        or bool(cloud.mood)
                    ),
                    held_s,
                )
        value = cloud.values[key]
        return 200, value, {"Metadata-Flavor": "Google", "ETag": etag(value)}

    def _azure(self, url: Any) -> tuple[int, str, dict[str, str]]:
        if self.headers.get("Metadata") != "true" or "api-version" not in parse_qs(url.query):
            return 400, "", {}
        if url.path == "/metadata/instance/compute/name":
            return 200, self.cloud.machine, {}
        if url.path == "/metadata/scheduledevents":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.cloud.events}), {}
        return 404, "", {}

    def _answer(self, status: int, text: str, headers: dict[str, str]) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def etag(value: str) -> str:
    """Return what changes with a value."""
    return f"tag/{value}"


@contextlib.contextmanager
def serving(cloud: Cloud) -> Iterator[MetadataEndpoint]:
    """Serve on a free port until the end of the block."""
    handler = type("BoundHandler", (Handler,), {"cloud": cloud})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield MetadataEndpoint("127.0.0.1", server.server_address[1])
        finally:
            with cloud.changed:
                cloud.is_over = True
                cloud.changed.notify_all()
            server.shutdown()
            thread.join()


def nobody() -> MetadataEndpoint:
    """Return an address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return MetadataEndpoint("127.0.0.1", probe.getsockname()[1])
