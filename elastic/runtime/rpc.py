"""Common gRPC code: addresses, options, channels, and the mapping of errors.

Rule: no code above this layer sees a gRPC status. A server turns an `ElasticError` into a status
with `status_of`; a client turns that status back into the same class with `error_from_rpc`. grpc is
imported only when a channel or a server is made.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from elastic import errors
from elastic.core.config import ENTRY_BYTES_MAX
from elastic.core.messages import PROTOCOL
from elastic.errors import (
    ConfigError,
    CoordinatorUnreachable,
    CoordinatorUntrusted,
    ElasticError,
    NotLeading,
    PeerError,
    VersionMismatch,
)
from elastic.runtime.access import Access

if TYPE_CHECKING:
    import grpc

MESSAGE_BYTES_MAX = 2 * ENTRY_BYTES_MAX
"""Above the largest job and the largest Hello (some thousand workers); the codec's limit too."""
PENDING_REQUESTS_MAX = 100_000
"""Calls that arrived and were not started; three thousand agents may reconnect at once."""
SILENCE_S = 1.5
"""A peer whose host is silent this long is lost."""
SILENCE_S_MIN, SILENCE_S_MAX = 0.5, 10.0
"""Agents must find the next leader before it gives them up (`adoption_grace_s`)."""
LOOKAHEAD_BYTES = 512 * 1024
"""Unread bytes in flight per stream: 16 MiB of code arrive in 32 round trips."""
STREAMS_PER_CONNECTION_MAX = 256
CONNECTIONS_MAX = 16_384
"""Above ten thousand agents and their users; see `elastic.coord.server_limits.raise_file_limit`."""
HANDSHAKE_MS_MAX = 10_000
"""A client that connects without a handshake is disconnected after this."""
IDLE_CONNECTION_MS_MAX = 300_000
"""A connection without calls is closed after this; a client reconnects when needed."""
DETAIL_CHARS_MAX = 3000
"""gRPC sends error texts as headers, which peers limit to 8 KiB in all."""
ADDRESSES_MAX = 8
"""Coordinator addresses in a message; a client without a leader tries all of them."""
ADDRESS_CHARS_MAX = 262
"""The longest host name, and a port."""
PROTOCOL_KEY = "elastic-protocol"
ERROR_KEY = "elastic-error"
LEADER_KEY = "elastic-leader"
TERM_KEY = "elastic-term"
"""In a reply: the leader's term. In an agent's call: the newest term whose leader it could not
reach, so that a standby replies only when there is a later one."""
TERM_DIGITS_MAX = 32
FRESH_KEY = "elastic-fresh"
"""In a read-only call: a standby must refuse it, instead of replying with possibly stale data."""
TIME_KEY = "elastic-time-ns"
"""In the server's initial metadata to an agent: its wall clock, for `elastic-agent doctor`."""
SILENCE_KEY = "elastic-silence-ms"
"""In the server's initial metadata to an agent: silence after which it considers a peer lost."""
COORDINATORS_KEY = "elastic-coordinators"
"""In a reply: the addresses of all coordinators, separated by commas."""
TOKEN_KEY = "authorization"
BEARER = "Bearer "

Metadata = tuple[tuple[str, str], ...]
Options = tuple[tuple[str, int], ...]


# ------------------------------------------------------------------------------------- addresses


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port".

    Raises:
        ConfigError: no host, or no port between 1 and 65535.
    """
    host, colon, port = text.strip().rpartition(":")
    bare = host.startswith("[") and host.endswith("]")
    if bare:
        host = host[1:-1]
    # ASCII only, for headers: a standby must be able to send its leader's address in one.
    is_plain = host.isascii() and host.isprintable() and " " not in host
    if not colon or not host or (":" in host and not bare) or not is_plain:
        raise ConfigError(f"address {text!r}: expected host:port, or [ipv6]:port, in ASCII")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"address {text!r}: port {port!r} is not a number from 1 to 65535")
    return host, int(port)


def format_endpoint(host: str, port: int) -> str:
    """Join to "host:port"; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split "host:port,host:port" in the order given, each once.

    Raises:
        ConfigError: the list is empty, or one of its members is no address.
    """
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"coordinator address {text!r}: expected host:port[,host:port...]")
    return tuple(dict.fromkeys(format_endpoint(*parse_endpoint(part)) for part in parts))


def plain_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses in a peer's comma-separated list: each once, `ADDRESSES_MAX` at most.

    Those that are invalid or too long are left out.
    """
    found: dict[str, None] = {}
    for part in text[: ADDRESSES_MAX * ADDRESS_CHARS_MAX].split(",")[:ADDRESSES_MAX]:
        with contextlib.suppress(ConfigError):
            address = format_endpoint(*parse_endpoint(part))
            if len(address) <= ADDRESS_CHARS_MAX:
                found[address] = None
    return tuple(found)


def is_loopback(host: str) -> bool:
    """Return whether `host` is loopback; a name other than localhost is not resolved."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --------------------------------------------------------------------------------------- options


def channel_options(silence_s: float = SILENCE_S) -> Options:
    """Return the options of every client channel.

    A silent server is detected after at most 0.9 + 0.5 of 1.5 s. `grpc.http2.ping_timeout_ms` ends
    the wait for a ping's reply; with `keepalive_timeout_ms` alone it would be a minute.
    """
    timeout_ms = round(silence_s * 1000 / 3)
    return (
        # Any data read delays the next ping, such as the server's pings, which are more frequent.
        ("grpc.keepalive_time_ms", round(silence_s * 600)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        *size_options(),
        # A retry is a new channel: it must not inherit the back-off of the previous one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # The control plane is inside the cluster: ignore a proxy that is set for the web.
        ("grpc.enable_http_proxy", 0),
    )


def server_options(connections: int = CONNECTIONS_MAX, silence_s: float = SILENCE_S) -> Options:
    """Return the options of every server; `connections` may be open at once.

    A silent client is detected after at most 0.6 + 0.8 of 1.5 s: the call context's done-callback
    fires, the request iterator does not end. Without the two `max_pending_requests` limits a server
    cancels some of a thousand clients that connect at once.
    """
    timeout_ms = round(silence_s * 1600 / 3)
    return (
        ("grpc.keepalive_time_ms", round(silence_s * 400)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", PENDING_REQUESTS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_REQUESTS_MAX),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS_MAX),
        # Two servers on one port would each get some of the agents.
        ("grpc.so_reuseport", 0),
        *size_options(),
    )


def size_options() -> Options:
    """Return the limits of message sizes and flow control, equal on both sides."""
    return (
        # Bandwidth probing sends a ping for each message: with thousands of agents that is half of
        # a message's cost. A fixed window replaces it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    )


# ------------------------------------------------------------------------------ who may come in


def call_metadata(token: str = "") -> Metadata:
    """Return the metadata of every call: the protocol version and, if there is one, the token."""
    version = ((PROTOCOL_KEY, PROTOCOL),)
    return (*version, (TOKEN_KEY, BEARER + token)) if token else version


def bearer_of(metadata: Iterable[tuple[str, Any]]) -> str:
    """Return the token of a call, "" for none."""
    given = next((str(value) for key, value in metadata if key.lower() == TOKEN_KEY), "")
    return given.removeprefix(BEARER) if given.startswith(BEARER) else ""


def term_of(text: str) -> int:
    """Parse a term from metadata, 0 for none and for one too large to be real."""
    return int(text) if text.isdecimal() and len(text) <= TERM_DIGITS_MAX else 0


def version_of(metadata: Iterable[tuple[str, Any]]) -> str:
    """Return the protocol version of a call, "" for none, as from a generic gRPC tool."""
    return next((str(value) for key, value in metadata if key.lower() == PROTOCOL_KEY), "")


def check_version(version: str, peer: str) -> None:
    """Refuse a caller of another protocol version; "" passes.

    Raises:
        VersionMismatch: the versions differ.
    """
    if version and version != PROTOCOL:
        raise VersionMismatch(peer, theirs=version, ours=PROTOCOL)


# ---------------------------------------------------------------------------------------- errors

STATUS_NAMES: tuple[tuple[type[ElasticError], str], ...] = (
    (errors.PeerError, "INVALID_ARGUMENT"),
    (errors.UsageError, "INVALID_ARGUMENT"),
    (errors.NotPermitted, "PERMISSION_DENIED"),
    (errors.NotAuthorized, "UNAUTHENTICATED"),
    (errors.NameTaken, "ALREADY_EXISTS"),
    (errors.NotFound, "NOT_FOUND"),
    (errors.Fenced, "ABORTED"),
    (errors.Refused, "FAILED_PRECONDITION"),
    (errors.Busy, "RESOURCE_EXHAUSTED"),
    (errors.Unavailable, "UNAVAILABLE"),
)
"""The first row that matches the error's class applies; INTERNAL if none does."""

ERRORS_BY_NAME: dict[str, type[ElasticError]] = {
    kind.__name__: kind
    for kind in (
        errors.Busy, errors.ConfigError, errors.Fenced, errors.NameTaken, errors.NotAuthorized,
        errors.NotFound, errors.NotPermitted, errors.PeerError, errors.Refused,
        errors.StorageError, errors.StoreError, errors.StoreUnavailable, errors.Unavailable,
        errors.UsageError,
    )
}  # fmt: skip
"""Classes sent by name in the trailing metadata; each is constructed from one text."""

ERRORS_BY_STATUS: dict[str, type[ElasticError]] = {
    "INVALID_ARGUMENT": errors.UsageError,
    "UNAUTHENTICATED": errors.NotAuthorized,
    "PERMISSION_DENIED": errors.NotPermitted,
    "ALREADY_EXISTS": errors.NameTaken,
    "NOT_FOUND": errors.NotFound,
    "ABORTED": errors.Fenced,
    "FAILED_PRECONDITION": errors.Refused,
    "RESOURCE_EXHAUSTED": errors.Refused,
}
CONNECTING = "failed to connect to all addresses"
UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


def status_of(error: ElasticError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return (code, details, trailing metadata) with which a server ends a call.

    The text is cut to what headers may hold.
    """
    import grpc

    name = next((code for kind, code in STATUS_NAMES if isinstance(error, kind)), "INTERNAL")
    trailing: Metadata = ((ERROR_KEY, type(error).__name__), (PROTOCOL_KEY, PROTOCOL))
    if isinstance(error, NotLeading):
        # From the store, which others may write: an invalid address must not break the reply.
        is_plain = error.leader.isascii() and error.leader.isprintable()
        trailing += ((LEADER_KEY, error.leader if is_plain else ""), (TERM_KEY, str(error.term)))
    return grpc.StatusCode[name], str(error)[:DETAIL_CHARS_MAX], trailing


def error_from_rpc(error: BaseException, address: str) -> ElasticError:
    """Return one of our errors for a failed call; the caller raises it.

    Args:
        error: a `grpc.RpcError` (also of grpc.aio), or our own error, returned unchanged.
        address: the endpoint that was called.
    """
    if isinstance(error, ElasticError):
        return error
    code = getattr(error, "code", None)
    if code is None:
        return PeerError(f"calling {address} failed with {type(error).__name__}: {error}")
    status = str(code().name)
    details = str(error.details() or "")  # type: ignore[attr-defined]
    trailing = {str(key): value for key, value in (error.trailing_metadata() or ())}  # type: ignore[attr-defined]
    name = str(trailing.get(ERROR_KEY, ""))
    if name == VersionMismatch.__name__:
        theirs = str(trailing.get(PROTOCOL_KEY, "?"))
        return VersionMismatch(f"the coordinator at {address}", theirs=theirs, ours=PROTOCOL)
    if name == NotLeading.__name__:
        term = str(trailing.get(TERM_KEY, ""))
        leader = str(trailing.get(LEADER_KEY, ""))
        return NotLeading(details, leader=leader, term=term_of(term))
    if name in ERRORS_BY_NAME:
        return ERRORS_BY_NAME[name](details)
    if status in UNREACHABLE and (untrusted := _untrusted(address, details)) is not None:
        return untrusted
    if status in UNREACHABLE:
        return CoordinatorUnreachable(address, details or status)
    if status in ERRORS_BY_STATUS:
        return ERRORS_BY_STATUS[status](details or status)
    if status == "UNIMPLEMENTED":
        return PeerError(
            f"{address} answers gRPC but is no elastic coordinator of this version ({details}); "
            f"check the address and the versions on both sides"
        )
    return PeerError(f"{address} answered {status}: {details}")


def _untrusted(address: str, details: str) -> CoordinatorUntrusted | None:
    """Return the error for a failed TLS handshake, None if the failure was another one."""
    if CONNECTING not in details:
        return None
    if "WRONG_VERSION_NUMBER" in details:
        why = "it does not speak TLS: leave out --tls-*, or start it with --tls-dir"
    elif "CERTIFICATE_VERIFY_FAILED" in details or "NO_TRUSTED_CERTIFICATE" in details:
        why = (
            "its certificate was not signed for a coordinator by the authority in --tls-ca, or is "
            "over: compare the ca.crt of both sides, or renew it ('elastic-coord certs issue')"
        )
    elif "is not in peer certificate" in details or "Hostname Verification" in details:
        why = (
            "its certificate is not for this host name: use one that it is for, or issue it anew "
            "with 'elastic-coord certs issue ... --host NAME'"
        )
    elif details.endswith("Socket closed") or "Connection reset" in details:
        why = (
            "it closed the connection before it sent anything: if it uses TLS, pass --tls-dir (or "
            "ELASTIC_TLS_DIR) with a certificate that its authority signed and that is not over; "
            "if it is only starting or ending, try again"
        )
    else:
        return None
    return CoordinatorUntrusted(address, why)


# -------------------------------------------------------------------------------------- channels

NO_ACCESS = Access()


def silence_of(metadata: Iterable[tuple[str, Any]]) -> float:
    """Return the silence limit that a server sent, in seconds; `SILENCE_S` if it sent none."""
    for key, value in metadata:
        if key == SILENCE_KEY and str(value).isdecimal() and len(str(value)) <= TERM_DIGITS_MAX:
            return min(max(SILENCE_S_MIN, int(value) / 1000), SILENCE_S_MAX)
    return SILENCE_S


def open_channel(
    endpoint: str, access: Access = NO_ACCESS, silence_s: float = SILENCE_S
) -> grpc.aio.Channel:
    """Open an asyncio channel; it connects in the background.

    Args:
        endpoint: "host:port".
        access: credentials for the server; its files are read now.
        silence_s: a server that is silent this long is lost.

    Raises:
        ConfigError: a TLS file of `access` is not valid; there is no other error.
    """
    import grpc.aio

    credentials = access.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=channel_options(silence_s))
    return grpc.aio.secure_channel(endpoint, credentials, options=channel_options(silence_s))


def open_blocking_channel(endpoint: str, access: Access = NO_ACCESS) -> grpc.Channel:
    """Open a channel for code without an event loop, such as the CLI; see `open_channel`."""
    import grpc

    credentials = access.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(endpoint, options=channel_options())
    return grpc.secure_channel(endpoint, credentials, options=channel_options())
