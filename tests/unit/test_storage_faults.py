"""Which failures of storage pass, which are about credentials, and which are there to stay."""

from __future__ import annotations

import errno
import http.client

import pytest

from elastic.storage.faults import is_about_credentials, is_passing


class ClientError(Exception):
    """What botocore raises when S3 says no."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ConnectTimeoutError(Exception):
    """The same name as botocore's."""


class ClientPayloadError(Exception):
    """The same name as aiohttp's."""


class HttpError(Exception):
    """What gcsfs raises."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def translated(error: Exception, into: Exception) -> Exception:
    into.__cause__ = error
    return into


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
        OSError(errno.ESTALE, "Stale file handle"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(),
        http.client.IncompleteRead(b"half"),
        ConnectTimeoutError(),
        ClientPayloadError(),
        ClientError("SlowDown", 503),
        ClientError("ThrottlingException", 400),
        ClientError("RequestTimeout", 400),
        ClientError("WhatIsThis", 502),
        HttpError(429),
        HttpError(500),
        translated(ClientError("SlowDown", 503), OSError(errno.EBUSY, "Please reduce your rate")),
        translated(ConnectTimeoutError(), ValueError("wrapped")),
    ],
    ids=repr,
)
def test_these_pass(error: Exception) -> None:
    assert is_passing(error)
    assert not is_about_credentials(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EROFS, "Read-only file system"),
        PermissionError(errno.EACCES, "Permission denied"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        IsADirectoryError(),
        ValueError("no such option"),
        translated(ClientError("NoSuchBucket", 404), FileNotFoundError("no such bucket")),
        translated(ClientError("AccessDenied", 403), PermissionError("Access Denied")),
        ClientError("NotImplemented", 501),
    ],
    ids=repr,
)
def test_these_stay(error: Exception) -> None:
    assert not is_passing(error)
    assert not is_about_credentials(error)


@pytest.mark.parametrize(
    "error",
    [
        translated(ClientError("ExpiredToken", 400), PermissionError("The token has expired")),
        translated(ClientError("403", 403), PermissionError("Forbidden")),
        # A code that s3fs does not know becomes an input/output error.
        translated(ClientError("ExpiredTokenException", 400), OSError(errno.EIO, "expired")),
        ClientError("Unauthorized", 401),
        HttpError(401),
        type("NoCredentialsError", (Exception,), {})(),
    ],
    ids=repr,
)
def test_these_are_about_credentials_and_trying_again_with_the_same_is_of_no_use(
    error: Exception,
) -> None:
    assert is_about_credentials(error)
    assert not is_passing(error)
