"""Join tokens: a file with hash, role, name and expiry of each, and the check of a caller's token.

Rule: a token is shown once, when it is created; the file holds only its hash. The file is replaced
atomically. A running coordinator rereads it when it changes: a damaged file leaves the tokens
unchanged, a missing one revokes all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic.coord.roles import Caller, Role
from elastic.core.config import check_name
from elastic.errors import ElasticError, NotAuthorized, NotFound, UsageError
from elastic.runtime.access import file_signature, replace_file, warn_if_open
from elastic.runtime.clock import Clock

log = logging.getLogger(__name__)

VERSION = 1
PREFIX = "elt"
ID_BYTES = 5
SECRET_BYTES = 32
TOKENS_MAX = 10_000
FILE_BYTES_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token, without the secret.

    Attributes:
        token_id: identifies it in lists and in the token itself; not secret.
        name: of the node or user it was created for, "" for none; a node's token is bound to it.
        role: what it permits.
        digest: SHA-256 of the secret, hexadecimal. No slow hash: the secret is 32 random bytes.
        created_ns, expires_ns, revoked_ns: Unix times; 0 for never.
    """

    token_id: str
    name: str
    role: Role
    digest: str
    created_ns: int
    expires_ns: int = 0
    revoked_ns: int = 0

    def why_over(self, now_ns: int) -> str:
        """Return why it is no longer valid, "" if it is."""
        if self.revoked_ns:
            return "was revoked"
        return "has expired" if self.expires_ns and now_ns >= self.expires_ns else ""


def create_token(path: Path, token: Token) -> str:
    """Add a token to the file, which is created if missing; return the token with its secret.

    Args:
        path: of the file.
        token: its id and digest are ignored and drawn here.

    Raises:
        UsageError: not a token file, or it cannot be written, or the name is not valid.
    """
    if token.name:
        check_name("token", token.name)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    with _changing(path) as tokens:
        if len(tokens) >= TOKENS_MAX:
            raise UsageError(f"token file {path} holds {len(tokens)} tokens; revoke with --forget")
        taken = {known.token_id for known in tokens}
        while (token_id := secrets.token_hex(ID_BYTES)) in taken:
            pass
        tokens.append(replace(token, token_id=token_id, digest=_digest(secret)))
    return f"{PREFIX}_{token_id}_{secret}"


def revoke_token(path: Path, wanted: str, now_ns: int) -> tuple[Token, ...]:
    """Revoke the token of this id, or all tokens of this name; return them.

    Raises:
        NotFound: there is none, or none of them is valid.
    """
    with _changing(path) as tokens:
        revoked = []
        for index, token in enumerate(tokens):
            if wanted in (token.token_id, token.name) and not token.why_over(now_ns):
                tokens[index] = replace(token, revoked_ns=now_ns)
                revoked.append(tokens[index])
        if not revoked:
            raise NotFound(
                f"no valid token has the id or name {wanted!r} in {path}; see 'elastic-coord "
                f"tokens list'"
            )
    return tuple(revoked)


def forget_tokens(path: Path, now_ns: int) -> int:
    """Remove revoked and expired tokens from the file; return their number."""
    with _changing(path) as tokens:
        left = [token for token in tokens if not token.why_over(now_ns)]
        number = len(tokens) - len(left)
        tokens[:] = left
    return number


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Return all tokens of a file, in the order of their creation.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it cannot be read, or any part of it is not valid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"token file {path} cannot be read: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"token file {path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        record = json.loads(data)
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']!r}")
        tokens = tuple(_token(fields) for fields in record["tokens"])
        if len({token.token_id for token in tokens}) != len(tokens):
            raise ValueError("an id twice")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"token file {path} is damaged ({type(error).__name__}: {error}); expected what "
            f"'elastic-coord tokens' wrote, version {VERSION}"
        ) from error
    warn_if_open(path)
    return tokens


def no_token_file(path: Path) -> UsageError:
    return UsageError(
        f"token file {path} does not exist; make it with 'elastic-coord tokens create --tokens "
        f"{path} --role node'"
    )


class TokenList:
    """The tokens that a running coordinator accepts, from its file."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file.

        Raises:
            UsageError: it is missing or damaged: a coordinator must not start without its tokens.
        """
        self._path = path
        self._clock = clock
        self._seen = file_signature(path)
        self._complaint = ""
        self._tokens: dict[str, Token] = {}
        try:
            self._take(read_tokens(path))
        except FileNotFoundError as error:
            raise no_token_file(path) from error

    def reload(self) -> list[tuple[str, Token]]:
        """Reread the file if it changed; return changes: ("created", ...), ("revoked", ...).

        Never raises: a file that cannot be read is logged and changes nothing.
        """
        seen = file_signature(self._path)
        if seen == self._seen:
            return []
        before = self._tokens
        try:
            self._take(read_tokens(self._path))
        except FileNotFoundError:
            self._complain(f"token file {self._path} is gone: no token is taken any more")
            self._tokens = {}
        except ElasticError as error:
            self._complain(f"{error}; the tokens stay as they were")
            return []
        else:
            self._complaint = ""
        self._seen = seen
        return _changes(before, self._tokens)

    def caller(self, shown: str) -> Caller | None:
        """Return the caller of a token, None if it is unknown; compares in constant time.

        Raises:
            NotAuthorized: the token was revoked or has expired.
        """
        prefix, _, rest = shown.partition("_")
        token_id, _, secret = rest.partition("_")
        token = self._tokens.get(token_id)
        digest = token.digest if token is not None else "0" * 64
        is_right = hmac.compare_digest(_digest(secret), digest)
        if token is None or not is_right or prefix != PREFIX:
            return None
        if why := self.why_over(token_id):
            raise NotAuthorized(
                f"{why}; ask for another ('elastic-coord tokens create --role {token.role.value}') "
                f"and write it into the --token-file"
            )
        return Caller(token.role, token.name or token_id, "token", token_id, bool(token.name))

    def why_over(self, token_id: str) -> str:
        """Return why the token of this id is no longer valid, "" if it is."""
        token = self._tokens.get(token_id)
        why = token.why_over(self._clock.unix_ns()) if token is not None else "was removed"
        return f"token {token_id} {why}" if why else ""

    def _take(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = {token.token_id: token for token in tokens}

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.error("token_file_unusable error=%r", text)


def _changes(before: dict[str, Token], after: dict[str, Token]) -> list[tuple[str, Token]]:
    created = [("created", token) for key, token in after.items() if key not in before]
    revoked = [
        ("revoked", token)
        for key, token in before.items()
        if not token.revoked_ns and (key not in after or after[key].revoked_ns)
    ]
    return created + revoked


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _token(fields: dict[str, Any]) -> Token:
    token = Token(**{**fields, "role": Role(fields["role"])})
    texts = (token.token_id, token.name, token.digest)
    times = (token.created_ns, token.expires_ns, token.revoked_ns)
    if not all(isinstance(text, str) for text in texts) or len(token.digest) != 64:
        raise ValueError(f"token {token.token_id!r}: expected texts, and a digest of 64 characters")
    if not all(type(moment) is int and moment >= 0 for moment in times):
        raise ValueError(f"token {token.token_id!r}: expected times in nanoseconds")
    return token


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """Yield the tokens of a file under a lock; then write the list back as the caller left it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(f"token file {path} cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            tokens = list(read_tokens(path))
        except FileNotFoundError:
            tokens = []
        yield tokens
        _write(path, tokens)
    finally:
        os.close(lock)


def _write(path: Path, tokens: list[Token]) -> None:
    records = [{**asdict(token), "role": token.role.value} for token in tokens]
    text = json.dumps({"version": VERSION, "tokens": records}, indent=1) + "\n"
    try:
        replace_file(path, text.encode(), 0o600)
    except OSError as error:
        raise UsageError(f"token file {path} cannot be written: {error}") from error
