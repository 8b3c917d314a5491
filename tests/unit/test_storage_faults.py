"""Which failures of storage pass, which are about credentials, and which are there to stay."""

from __future__ import annotations

import errno

import pytest

from elastic.storage.faults import is_about_credentials, is_passing


class ClientError(Exception):
    """What botocore raises when S3 says no."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


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
