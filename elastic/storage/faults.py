"""Classifies storage errors: transient, bad credentials, or permanent.

Rule: decided by the error and its causes (`__cause__`), without importing the clients of object
stores, which are optional: their classes are recognized by name.
"""

from __future__ import annotations

import errno
import http
import http.client
from collections.abc import Iterator
from typing import Any

PASSING_ERRNOS = frozenset({
    errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.EBUSY,
    errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
    errno.ENOTCONN, errno.ESHUTDOWN,
})  # fmt: skip
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PASSING_CODES = frozenset({
    "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException",
    "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
    "RequestThrottledException", "TooManyRequestsException", "BandwidthLimitExceeded",
    "ProvisionedThroughputExceededException", "TransactionInProgressException", "OperationAborted",
    "IncompleteBody", "BadDigest", "PriorRequestNotComplete", "ConditionalRequestConflict",
})  # fmt: skip
"""Error codes of S3, and of compatible stores."""
CREDENTIAL_CODES = frozenset({
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired",
    "InvalidToken", "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch",
    "AuthFailure", "UnrecognizedClientException", "401", "403", "Forbidden", "Unauthorized",
})  # fmt: skip
"""Includes a bare 403: a reply without a body (HEAD) has no other code, whatever is wrong."""
PASSING_CLASSES = frozenset({
    "HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError",
    "ConnectionClosedError", "ResponseStreamingError", "IncompleteReadError", "IncompleteRead",
    "ClientPayloadError", "ServerDisconnectedError", "ServerTimeoutError", "ClientConnectorError",
    "ClientOSError", "ServiceRequestError", "ServiceResponseError", "FSTimeoutError",
    "ConnectionError",
})  # fmt: skip
"""Classes of botocore, aiohttp, azure-core and fsspec, by name; subclasses count as well."""
CREDENTIAL_CLASSES = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
    "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError",
    "ClientAuthenticationError", "RefreshError",
})  # fmt: skip
FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def reason_of(error: BaseException) -> str:
    """Return the reason of a storage error as text; a full disk is named explicitly."""
    if isinstance(error, OSError):
        if error.errno in FULL_ERRNOS:
            return f"disk full ({error.strerror})"
        if error.strerror:
            return error.strerror
    return f"{type(error).__name__}: {error}"


def is_passing(error: BaseException) -> bool:
    """Return whether a retry of the operation may succeed.

    A full disk, a missing file or bucket, and missing permissions are permanent.
    """
    chain = list(_chain(error))
    if any(isinstance(one, FINAL) or _errno(one) in FULL_ERRNOS for one in chain):
        return False
    return not is_about_credentials(error) and any(_is_passing(one) for one in chain)


def is_about_credentials(error: BaseException) -> bool:
    """Return whether storage refused the credentials, rather than the operation."""
    return any(
        _code(one) in CREDENTIAL_CODES or _status(one) == 401 or _is_named(one, CREDENTIAL_CLASSES)
        for one in _chain(error)
    )


def is_name_taken(error: BaseException) -> bool:
    """Return whether a conditional write was refused because there is an object of the name.

    s3fs raises `FileExistsError` only if the reply names the condition, as that of AWS does;
    MinIO, Ceph and others answer 412 without it.
    """
    return isinstance(error, FileExistsError) or any(
        _status(one) == http.HTTPStatus.PRECONDITION_FAILED or _code(one) == "PreconditionFailed"
        for one in _chain(error)
    )


def _is_passing(error: BaseException) -> bool:
    status = _status(error)
    return (
        isinstance(error, (ConnectionError, TimeoutError, http.client.IncompleteRead))
        or _errno(error) in PASSING_ERRNOS
        or _code(error) in PASSING_CODES
        or status in (408, 429)
        or (status >= 500 and status != http.HTTPStatus.NOT_IMPLEMENTED)
        or _is_named(error, PASSING_CLASSES)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, at most 8."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__


def _errno(error: BaseException) -> int:
    return (error.errno or 0) if isinstance(error, OSError) else 0


def _answer(error: BaseException) -> dict[str, Any]:
    """Return the server's reply in a botocore ClientError, {} for other errors."""
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else {}


def _code(error: BaseException) -> str:
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error, 0 for none."""
    http_status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    for value in (
        http_status,
        *(getattr(error, name, 0) for name in ("status", "status_code", "code")),
    ):
        if isinstance(value, int) and value:
            return value
    return 0


def _is_named(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)
