"""What opens a cluster, as files: certificates and tokens that are made, replaced and read."""

from __future__ import annotations

import datetime
import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from elastic.client.endpoints import Endpoints, with_reason
from elastic.coord.certs import CertificateRequest, init_authority, issue
from elastic.coord.cli import exit_code, main
from elastic.coord.roles import Role
from elastic.coord.serve import ServeOptions
from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.errors import Busy, ConfigError, CoordinatorUntrusted, NotLeading, UsageError
from elastic.runtime.access import PEM_BYTES_MAX, Access, TlsFiles
from elastic.runtime.certificates import read_shown
from elastic.runtime.clock import SystemClock
from elastic.runtime.rpc import call_metadata
from elastic.runtime.tether import check_tether

NOW = datetime.datetime.now(datetime.timezone.utc)


def elastic_coord(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ------------------------------------------------------------------------------ certificates


def test_an_authority_is_not_begun_when_its_first_certificate_cannot_be_made(
    tmp_path: Path,
) -> None:
    for days in (5000.0, 40_000.0):
        with pytest.raises(UsageError, match="--days"):
            init_authority(tmp_path / "ca", ("localhost",), NOW, days)
    assert not files_of(tmp_path)
    init_authority(tmp_path / "ca", ("localhost",), NOW)


def test_a_certificate_is_renewed_in_its_role_and_never_replaced_by_one_of_another(
    tmp_path: Path,
) -> None:
    made = init_authority(tmp_path, ("localhost",), NOW)
    before = (made / "tls.crt").read_bytes()
    with pytest.raises(UsageError, match="holds a certificate of role admin"):
        issue(tmp_path, CertificateRequest(name="coordinator", role=Role.READ), NOW)
    assert (made / "tls.crt").read_bytes() == before
    issue(
        tmp_path, CertificateRequest(name="coordinator", role=Role.ADMIN, hosts=("localhost",)), NOW
    )
    assert (made / "tls.crt").read_bytes() != before


def test_a_bundle_of_many_authorities_is_read_whole_or_refused(tmp_path: Path) -> None:
    init_authority(tmp_path, ("localhost",), NOW)
    one = (tmp_path / "ca.crt").read_bytes()
    bundle = tmp_path / "all.crt"
    bundle.write_bytes(one * (200_000 // len(one)))
    assert TlsFiles(ca=bundle).read().ca == bundle.read_bytes()
    bundle.write_bytes(one * (PEM_BYTES_MAX // len(one) + 1))
    with pytest.raises(ConfigError, match="larger than"):
        TlsFiles(ca=bundle).read()


# ------------------------------------------------------------------------------------ tokens


def test_a_token_cannot_outlive_what_a_date_can_say(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    refused = elastic_coord(
        "tokens", "create", "--tokens", path, "--role", "read", "--expires", "9999999w"
    )
    assert refused.exit_code == 2
    assert "never" in refused.output
    assert not path.exists()


def test_a_client_shows_the_token_that_its_file_holds_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    endpoints = Endpoints(("127.0.0.1:1",), Access(token_file=path), SystemClock())
    assert endpoints.metadata == call_metadata("first")
    path.write_text("second")
    assert endpoints.metadata == call_metadata("second")
    path.unlink()
    assert endpoints.metadata == call_metadata("second")


# ------------------------------------------------------------------------------------ limits


def test_probes_without_credentials_take_nothing_from_callers_of_the_same_host() -> None:
    door = AdmissionLimiter(
        ServerLimits(rate_per_s=0.001, burst=2.0, probes_per_caller_max=1), SystemClock()
    )
    with door.without_credentials("ipv4:10.0.0.1"):
        with pytest.raises(Busy, match="a stranger at"), door.without_credentials("ipv4:10.0.0.1"):
            pass
        with pytest.raises(Busy, match="a stranger at"), door.without_credentials("ipv4:10.0.0.1"):
            pass
        with door.user("ipv4:10.0.0.1", streams=True), door.user("ipv4:10.0.0.1", streams=False):
            pass


def test_a_ready_file_that_could_never_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ready-file"):
        ServeOptions(
            listen=("127.0.0.1", 0), store="memory:", ready_file=tmp_path / "none" / "ready"
        )


@pytest.mark.parametrize("name", ["audit_log", "event_log"])
def test_a_log_that_could_never_be_written_is_refused_at_the_start(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    given = {name: tmp_path / "file" / "log"}
    options = ServeOptions(listen=("127.0.0.1", 0), store="memory:", **given)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*file/log cannot be"):
        options.check_logs()
    given = {name: tmp_path / "new" / "log"}
    ServeOptions(listen=("127.0.0.1", 0), store="memory:", **given).check_logs()
    assert (tmp_path / "new" / "log").read_bytes() == b""


def test_a_pipe_is_taken_for_a_log_without_being_opened(tmp_path: Path) -> None:
    """To open it would wait for its reader, and to close it again would end the reader."""
    os.mkfifo(tmp_path / "pipe")
    ServeOptions(listen=("127.0.0.1", 0), store="memory:", event_log=tmp_path / "pipe").check_logs()


def test_a_log_that_cannot_be_made_now_may_be_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = ServeOptions(listen=("127.0.0.1", 0), store="memory:", audit_log=tmp_path / "log")
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ConfigError, match="No space") as wrong:
        options.check_logs()
    assert exit_code(wrong.value) == 69
    assert exit_code(ConfigError("no such folder")) == 78


def test_a_tether_that_nobody_holds_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tether-fd 999"):
        ServeOptions(listen=("127.0.0.1", 0), store="memory:", tether_fd=999)
    with (tmp_path / "file").open("w") as file, pytest.raises(ConfigError, match="--tether-fd"):
        check_tether(file.fileno())


def test_an_address_that_means_every_host_is_not_told_to_others() -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        ServeOptions(listen=("127.0.0.1", 0), store="memory:", advertise="0.0.0.0:7070")


def test_a_leader_that_only_standbys_can_reach_is_told_with_the_reason() -> None:
    standby = NotLeading("b leads; ask that one", leader="b:1", term=3)
    why = CoordinatorUntrusted("b:1", "its certificate is not for this host name")
    told = with_reason(standby, {"a:1": standby, "b:1": why})
    assert isinstance(told, NotLeading)
    assert (told.leader, told.term) == ("b:1", 3)
    assert str(told) == f"{standby}, which cannot be reached from here: {why.detail}"
    assert with_reason(standby, {"a:1": standby}) is standby


def test_a_certificate_says_whom_it_is_for_and_until_when(tmp_path: Path) -> None:
    wanted = CertificateRequest(name="bob", role=Role.SUBMIT)
    init_authority(tmp_path, ("localhost", "10.0.0.1"), NOW)
    for folder in (tmp_path / "coordinator", issue(tmp_path, wanted, NOW)):
        pem = (folder / "tls.crt").read_bytes()
        cert, shown = x509.load_pem_x509_certificate(pem), read_shown(pem)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(shown.uris) == names.get_values_for_type(x509.UniformResourceIdentifier)
        assert shown.serial == cert.serial_number
        assert shown.until_ns == int(cert.not_valid_after_utc.timestamp()) * 10**9
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shown(b"-----BEGIN CERTIFICATE-----")
