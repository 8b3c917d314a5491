"""The coordinator's side of TLS: its certificate, and the authority for those of clients.

Rule: the files are checked at each new connection, and reread when they changed. An unusable file
is logged and leaves the certificate unchanged. Open connections are not affected.
"""

from __future__ import annotations

import grpc

from elastic.errors import ConfigError
from elastic.runtime.access import TlsFiles, TlsTexts, WatchedFiles


class ServerTls:
    """Certificates that are replaced while the server runs.

    Attributes:
        asks_certificate: whether clients must present a certificate of the authority.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: one of them is not usable, or there is no certificate to serve with.
        """
        if files.cert is None:
            raise ConfigError(
                f"TLS with {files.ca} and no certificate: a coordinator needs a certificate: pass "
                f"--tls-cert and --tls-key, or as --tls-dir the folder that 'elastic-coord certs "
                f"init' wrote"
            )
        self._files = WatchedFiles("certificate", files.paths, files.read)
        self.asks_certificate = files.ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a server's port; gRPC polls them for renewals."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._files.content),
            self._renewed,  # type: ignore[arg-type]  # In gRPC, None means "no change".
            self.asks_certificate,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificate, None if unchanged; gRPC calls this in its own thread."""
        return _configuration(self._files.content) if self._files.reload() else None


def _configuration(texts: TlsTexts) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(texts.key, texts.cert)], root_certificates=texts.ca or None
    )
