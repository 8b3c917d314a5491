"""elastic-coord: the coordinator's state machine with its asyncio driver, journal and server."""

from __future__ import annotations

import os

# gRPC reads it when it is first imported. By default it logs every failed TLS handshake, and as an
# error each one for a foreign host name: any stranger could fill the disk with our log. A value
# that is already set, such as INFO, is kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
