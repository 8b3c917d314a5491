"""The coordinator's side of TLS: its certificate, and the authority for those of clients.

Rule: the files are checked at each new connection, and reread when they changed. An unusable file
is logged and leaves the certificate unchanged. Open connections are not affected.
"""

from __future__ import annotations

import logging

import grpc

from elastic.errors import ConfigError
from elastic.runtime.access import TlsFiles, TlsTexts, file_signature

log = logging.getLogger(__name__)


class ServerTls:
    """Certificates that are replaced while the server runs."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: one of them is not usable, or there is no certificate to serve with.
        """
        if files.cert is None:
            raise ConfigError(
                "a coordinator with TLS needs a certificate: pass --tls-cert and --tls-key, or as "
                "--tls-dir the folder that 'elastic-coord certs init' wrote"
            )
        self._files = files
        self._seen = self._signature()
        self._texts = files.read()
        self._complaint = ""

    @property
    def asks_certificate(self) -> bool:
        """Return whether clients must present a certificate of the authority."""
        return self._files.ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a server's port; gRPC polls them for renewals."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._texts),
            self._renewed,  # type: ignore[arg-type]  # In gRPC, None means "no change".
            self.asks_certificate,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificate, None if unchanged; gRPC calls this in its own thread."""
        seen = self._signature()
        if seen == self._seen:
            return None
        try:
            texts = self._files.read()
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("certificate_unusable error=%r", str(error))
            return None
        self._complaint, self._seen = "", seen
        if texts == self._texts:
            return None
        self._texts = texts
        log.info("certificate_renewed path=%s", self._files.cert)
        return _configuration(texts)

    def _signature(self) -> tuple[object, ...]:
        return tuple(
            file_signature(path) for path in (self._files.cert, self._files.key, self._files.ca)
        )


def _configuration(texts: TlsTexts) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(texts.key, texts.cert)], root_certificates=texts.ca or None
    )
