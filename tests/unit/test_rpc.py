"""Addresses, tokens, versions, and errors that cross the wire as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic import errors
from elastic.runtime.access import read_token_file
from elastic.runtime.rpc import (
    ERRORS_BY_NAME,
    LEADER_KEY,
    PROTOCOL,
    TERM_KEY,
    Metadata,
    bearer_of,
    call_metadata,
    check_version,
    error_from_rpc,
    is_loopback,
    parse_endpoints,
    status_of,
    term_of,
    version_of,
)


def test_a_list_of_addresses_keeps_its_order_and_loses_repeats() -> None:
    assert parse_endpoints("b:1, a:2,b:1,[::1]:3,") == ("b:1", "a:2", "[::1]:3")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-7", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# --------------------------------------------------------------------------------------- tokens


def token_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words", "one word of printable ASCII"),
        (b"two\nlines", "one word of printable ASCII"),
        ("schlüssel".encode(), "one word of printable ASCII"),
        (b"\xff\xfe", "token file"),
    ],
)
def test_a_token_that_cannot_travel_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    with pytest.raises(errors.UsageError, match=told):
        read_token_file(token_file(tmp_path, content))


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        (call_metadata(""), ""),
        (call_metadata("word"), "word"),
        ((("Authorization", "Bearer word"),), "word"),
        ((("authorization", "word"),), ""),
        ((("authorization", "Basic word"),), ""),
        ((("authorization", ""),), ""),
    ],
)
def test_a_token_travels_as_a_bearer_token(metadata: Metadata, token: str) -> None:
    assert bearer_of(metadata) == token


@pytest.mark.parametrize("version", ["1.99", "2.0", "x"])
def test_another_version_of_the_protocol_stays_out(version: str) -> None:
    check_version(version_of(call_metadata()), "p")
    check_version(version_of(()), "p")
    with pytest.raises(errors.VersionMismatch, match="p speaks protocol"):
        check_version(version_of((("elastic-protocol", version),)), "p")


# --------------------------------------------------------------------------------------- errors


class Ended(Exception):
    """A call that failed, as a client sees it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self.parts = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self.parts[0]

    def details(self) -> str:
        return self.parts[1]

    def trailing_metadata(self) -> Any:
        return self.parts[2]


@pytest.mark.parametrize("kind", list(ERRORS_BY_NAME.values()))
def test_an_error_arrives_as_what_it_was(kind: type[errors.ElasticError]) -> None:
    found = error_from_rpc(Ended(*status_of(kind("who did what"))), "h:1")
    assert type(found) is kind
    assert str(found) == "who did what"


def test_a_version_mismatch_arrives_with_both_versions_the_right_way_round() -> None:
    sent = errors.VersionMismatch("the agent", theirs="7.1", ours=PROTOCOL)
    code, details, trailing = status_of(sent)
    trailing = tuple((k, "9.2" if k == "elastic-protocol" else v) for k, v in trailing)
    found = error_from_rpc(Ended(code, details, trailing), "h:1")
    assert isinstance(found, errors.VersionMismatch)
    assert (found.theirs, found.ours) == ("9.2", PROTOCOL)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNAVAILABLE", errors.CoordinatorUnreachable),
        ("DEADLINE_EXCEEDED", errors.CoordinatorUnreachable),
        ("CANCELLED", errors.CoordinatorUnreachable),
        ("UNAUTHENTICATED", errors.NotAuthorized),
        ("PERMISSION_DENIED", errors.NotPermitted),
        ("ALREADY_EXISTS", errors.NameTaken),
        ("NOT_FOUND", errors.NotFound),
        ("INVALID_ARGUMENT", errors.UsageError),
        ("FAILED_PRECONDITION", errors.Refused),
        ("RESOURCE_EXHAUSTED", errors.Refused),
        ("ABORTED", errors.Fenced),
        ("UNIMPLEMENTED", errors.PeerError),
        ("INTERNAL", errors.PeerError),
        ("DATA_LOSS", errors.PeerError),
    ],
)
def test_a_status_of_a_stranger_becomes_one_of_our_errors(
    code: str, kind: type[errors.ElasticError]
) -> None:
    found = error_from_rpc(Ended(grpc.StatusCode[code], "because", None), "h:1")
    assert type(found) is kind
    assert "because" in str(found)


@pytest.mark.parametrize("leader", ["hóst:70", "a\nb:70"])
def test_a_leader_whose_address_no_header_carries_is_left_out(leader: str) -> None:
    _, text, trailing = status_of(errors.NotLeading("x leads", leader=leader, term=3))
    assert (text, dict(trailing)[LEADER_KEY]) == ("x leads", "")
    assert dict(trailing)[TERM_KEY] == "3"


@pytest.mark.parametrize(("text", "term"), [("7", 7), ("", 0), ("-1", 0), ("9" * 5000, 0)])
def test_a_term_that_nobody_ever_reached_is_none(text: str, term: int) -> None:
    assert term_of(text) == term


def test_what_is_no_rpc_error_is_named() -> None:
    found = error_from_rpc(RuntimeError("odd"), "h:1")
    assert isinstance(found, errors.PeerError)
    assert str(found) == "calling h:1 failed with RuntimeError: odd"
    ours = errors.Fenced("ours")
    assert error_from_rpc(ours, "h:1") is ours
