"""Coordinators with locks, and callers that bring keys: good ones, and every kind of bad one."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio

from elastic.coord.certs import CertificateRequest, init_authority, issue
from elastic.coord.roles import Role
from elastic.coord.tokens import Token, create_token
from elastic.runtime.access import Access, find_access
from elastic.runtime.rpc import Metadata, call_metadata, open_channel
from tests.patience import DEADLINE_S

NOW = datetime.datetime.now(datetime.timezone.utc)
HOUR_NS = 3600 * 10**9


def authority(folder: Path) -> Path:
    """Make an authority for this machine; its coordinator's folder is FOLDER/coordinator."""
    init_authority(folder, ("127.0.0.1", "localhost"), NOW)
    return folder


def certificate(
    folder: Path, name: str, role: Role, days: float = 1, hosts: tuple[str, ...] = ()
) -> Access:
    made = issue(folder, CertificateRequest(name=name, role=role, days=days, hosts=hosts), NOW)
    return find_access(tls_dir=str(made))


def token(path: Path, role: Role, name: str = "", **changes: Any) -> str:
    blank = Token(token_id="", name=name, role=role, digest="", created_ns=1)
    return create_token(path, replace(blank, **changes))


@dataclass(frozen=True)
class Outcome:
    """How a call ended: "OK" with a first answer, else the status."""

    code: str
    details: str = ""


async def call(
    address: str,
    method: str,
    *,
    access: Access,
    metadata: Metadata | None = None,
    message: bytes = b"",
) -> Outcome:
    """Call a method with a message and return what came of it."""
    if metadata is None:
        metadata = call_metadata(access.current_token())
    async with open_channel(address, access) as channel:
        # On the wire a method with one request is no different from one with many.
        talk: Any = channel.unary_stream(method)(message, metadata=metadata, timeout=DEADLINE_S)
        try:
            with anyio.fail_after(DEADLINE_S):
                answer = await talk.read()
                if isinstance(answer, bytes):
                    talk.cancel()
                    return Outcome("OK")
                return Outcome((await talk.code()).name, str(await talk.details()))
        except grpc.aio.AioRpcError as error:
            return Outcome(error.code().name, str(error.details()))


def audit_lines(path: Path) -> list[dict[str, Any]]:
    """What an audit file holds by now."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


async def wait_audited(path: Path, **wanted: str) -> dict[str, Any]:
    """Wait until the audit file has a line with these fields."""
    with anyio.fail_after(DEADLINE_S):
        while True:
            for line in audit_lines(path):
                fields = line["fields"]
                if all(fields.get(name) == value for name, value in wanted.items()):
                    return line
            await anyio.sleep(0.02)
