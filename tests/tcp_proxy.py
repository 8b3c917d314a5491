"""A TCP proxy on loopback that loses what it is told to: for answers that never come.

Rule: nothing happens by chance or by time; each loss is asked for by the test.
"""

from __future__ import annotations

import asyncio
import contextlib

CHUNK_BYTES = 64 * 1024


class Connection:
    """One client's connection, and ours to the server for it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        # What the client has sent and the server has not received.
        self.held: list[bytes] = []

    def cut(self) -> None:
        self.client.close()
        self.server.close()


class TcpProxy:
    """Forwards to one endpoint until told otherwise; an async context manager.

    Attributes:
        hold_requests: keep what clients send, for `release`.
        drop_answers: throw away what the server sends.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._host, self._port = host, int(port)
        self._connections: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._arrived = asyncio.Event()
        self._answered = asyncio.Event()
        self._passed = 0
        self.hold_requests = False
        self.drop_answers = False

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Close all connections, on both sides."""
        for connection in self._connections:
            connection.cut()
        self._connections.clear()

    def cut_clients(self) -> None:
        """Close the clients' sides only: the server still waits for what we hold."""
        for connection in self._connections:
            connection.client.close()

    async def release(self) -> None:
        """Give the server what was held, on the connections that it came on; returns when it has
        answered, so that it has certainly read it."""
        self._answered.clear()
        for connection in self._connections:
            for chunk in connection.held:
                connection.server.write(chunk)
            connection.held.clear()
        await self._answered.wait()

    async def wait_held(self, words: bytes) -> None:
        """Wait until some bytes are among those that are held."""
        while not any(words in b"".join(one.held) for one in self._connections):
            self._arrived.clear()
            await self._arrived.wait()

    async def wait_quiet(self, seconds: float) -> None:
        """Wait until nothing has passed in either direction for so long."""
        seen = -1
        while seen != self._passed:
            seen = self._passed
            await asyncio.sleep(seconds)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        connection = Connection(writer, to_server)
        self._connections.append(connection)
        for pump in (self._requests(reader, connection), self._answers(from_server, connection)):
            task = asyncio.ensure_future(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _requests(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                self._passed += 1
                if self.hold_requests:
                    connection.held.append(chunk)
                    self._arrived.set()
                else:
                    connection.server.write(chunk)
        if not connection.held:
            connection.cut()

    async def _answers(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                self._passed += 1
                self._answered.set()
                if not self.drop_answers and not connection.client.is_closing():
                    connection.client.write(chunk)
        connection.cut()
