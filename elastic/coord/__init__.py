"""elastic-coord: the coordinator's machine under an asyncio driver, with a journal and a server."""

from __future__ import annotations

import os

# gRPC reads it when it is first imported, and would write a line for every TLS handshake that
# fails, and as an error for every one that asks for a host name which is not ours: any stranger
# could fill the disk that holds our log. Set to INFO, it is left so.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
