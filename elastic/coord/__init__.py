"""elastic-coord: the coordinator's state machine with its asyncio driver, journal and server.

Decisions are in `core/machine/`. What is where:

    the process   cli, serve (all parts, in order), driver (events in, effects out) with its
                  event_queue, watchdog, suspend_detector, collector
    leading       leadership, leader_state, roster, standby_view, journal, payload_upload, chunks,
                  backup, store_access
    serving       server; server_agents and sessions (agents), server_jobs and watchers (users),
                  server_context, server_limits, server_probe, log_fanout, lookup, run_history
    locks         server_guard, roles, tokens, server_tls, certs, cli_locks, audit
    the page      history (what charts show), web/
"""

from __future__ import annotations

import os

# gRPC reads it when it is first imported. By default it logs every failed TLS handshake, and as an
# error each one for a foreign host name: any stranger could fill the disk with our log. A value
# that is already set, such as INFO, is kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
