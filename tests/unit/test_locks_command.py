"""`elastic-coord certs` and `tokens`, and what `serve` refuses: each with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elastic.coord.cli import main
from elastic.coord.log_fanout import BufferBudget, MergedOutput
from elastic.coord.roles import Role
from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.coord.tokens import TokenList
from elastic.core.facts import WorkerId
from elastic.errors import Busy, ConfigError
from elastic.runtime.access import TlsFiles, find_access
from elastic.runtime.clock import SystemClock


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    assert run("certs", "init", folder / "a", "--host", "coord.example").exit_code == 0
    assert run("certs", "init", folder / "b").exit_code == 0
    return folder


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("init", "{}/a"), "exists"),
        (("issue", "{}/none", "--name", "n", "--role", "node"), "certs init"),
        (("issue", "{}/a", "--name", "../n", "--role", "node"), "letters, digits"),
        (("issue", "{}/a", "--name", "n", "--role", "node", "--host", "h"), "only a coordinator"),
        (("issue", "{}/a", "--name", "n", "--role", "admin"), "without --host"),
        (
            ("issue", "{}/a", "--name", "n", "--role", "admin", "--host", "a b"),
            "host name or an IP",
        ),
        (("issue", "{}/a", "--name", "n", "--role", "node", "--days", "9999"), "past the end"),
    ],
)
def test_a_certificate_that_cannot_be_made_is_refused_with_what_to_do(
    pki: Path, args: tuple[str, ...], says: str
) -> None:
    done = run("certs", *(arg.format(pki) for arg in args))
    assert done.exit_code == 78
    assert says in done.stderr


def test_keys_are_for_their_owner_only_and_never_printed(pki: Path) -> None:
    done = run("certs", "issue", pki / "a", "--name", "n9", "--role", "node")
    assert "PRIVATE" not in done.output
    for key in (pki / "a" / "ca.key", pki / "a" / "n9" / "tls.key"):
        assert key.stat().st_mode & 0o777 == 0o600


def test_a_key_of_another_certificate_is_refused(pki: Path) -> None:
    ours, theirs = pki / "a" / "coordinator", pki / "b" / "coordinator"
    with pytest.raises(ConfigError, match="its own key"):
        TlsFiles(ours / "tls.crt", theirs / "tls.key", ours / "ca.crt").read()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tls_cert": "x.crt"}, "pass both"),
        ({"tls_cert": "x.crt", "tls_key": "x.key"}, "without --tls-ca"),
        ({"tls_ca": "nowhere.crt"}, "nowhere.crt"),
        ({"tls_dir": "nowhere"}, "nowhere/ca.crt"),
    ],
)
def test_flags_that_name_no_certificates_are_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_access(**flags)


def test_a_token_is_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    made = run(
        *("tokens", "create", "--tokens", path, "--role", "node", "--expires", "7d"),
        *("--name", "gpu-1"),
    )
    assert made.exit_code == 0, made.stderr
    shown = made.stdout.strip()
    assert shown.split("_", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    listed = run("tokens", "list", "--tokens", path)
    assert "gpu-1" in listed.stdout
    assert shown.split("_", 2)[2] not in listed.output
    tokens = TokenList(path, SystemClock())
    caller = tokens.caller(shown)
    assert caller is not None
    assert (caller.role, caller.name, caller.is_bound) == (Role.NODE, "gpu-1", True)
    assert run("tokens", "revoke", "--tokens", path, "gpu-1").exit_code == 0
    assert [action for action, _ in tokens.reload()] == ["revoked"]
    assert tokens.why_over(caller.token_id).endswith("was revoked")
    again = run("tokens", "revoke", "--tokens", path, "gpu-1")
    assert again.exit_code == 78
    assert "no valid token" in again.stderr
    assert run("tokens", "revoke", "--tokens", path, "--forget").stdout.startswith("removed 1")
    assert json.loads(path.read_text())["tokens"] == []


def test_a_list_of_tokens_that_is_not_there_is_not_an_empty_one(tmp_path: Path) -> None:
    done = run("tokens", "list", "--tokens", tmp_path / "none")
    assert done.exit_code == 78
    assert f"token file {tmp_path}/none does not exist" in done.stderr


@pytest.mark.parametrize("expires", ["7", "d", "-1d", "0d", "1y", "7 d", ""])
def test_a_length_of_time_that_is_none_is_refused(tmp_path: Path, expires: str) -> None:
    path = tmp_path / "tokens.json"
    done = run("tokens", "create", "--tokens", path, "--role", "read", "--expires", expires)
    assert done.exit_code == 2
    assert not path.exists()


def test_a_file_of_tokens_that_is_damaged_while_in_use_changes_nothing_and_a_gone_one_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.json"
    shown = run("tokens", "create", "--tokens", path, "--role", "read").stdout.strip()
    tokens = TokenList(path, SystemClock())
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    assert tokens.reload() == []
    assert tokens.caller(shown) is not None
    assert "the tokens stay as they were" in caplog.text
    path.unlink()
    assert [action for action, _ in tokens.reload()] == ["revoked"]
    assert tokens.caller(shown) is None
    path.write_bytes(whole)
    assert [action for action, _ in tokens.reload()] == ["created"]
    assert tokens.caller(shown) is not None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--listen", "0.0.0.0:0"), "pass --tls-dir"),
        (("--listen", "0.0.0.0:0", "--tls-cert", "{0}/tls.crt", "--tls-key", "{0}/tls.key"),
         "--insecure"),
        (("--tokens", "{0}/none"), "tokens create"),
        (("--tls-dir", "{0}", "--tokens", "{0}/none"), "certificate alone"),
        (("--tls-ca", "{0}/ca.crt"), "needs a certificate"),
        (("--tls-dir", "{0}/none"), "TLS with {0}/none/ca.crt and no certificate"),
    ],
)  # fmt: skip
def test_a_coordinator_does_not_start_with_half_a_lock(
    pki: Path, args: tuple[str, ...], says: str
) -> None:
    folder = pki / "a" / "coordinator"
    given = [arg.format(folder) for arg in args]
    done = run("serve", "--listen", "127.0.0.1:0", "--store", "memory:", *given)
    assert done.exit_code == 78
    assert says.format(folder) in done.stderr


def test_the_streams_of_one_nodes_credentials_are_limited() -> None:
    door = AdmissionLimiter(ServerLimits(streams_per_node_max=1), SystemClock())
    shared = (door.agent(""), door.agent(""), door.agent("n2"))
    with shared[0], shared[1], shared[2], door.agent("n1"):
        assert "n1 has 1 agents open" in refusal_of(door)
    assert refusal_of(door) == ""


def refusal_of(door: AdmissionLimiter) -> str:
    """Return why another stream of n1 is not let in, "" if it is."""
    try:
        with door.agent("n1"):
            return ""
    except Busy as error:
        return str(error)


def test_readers_share_what_may_wait_and_give_it_back() -> None:
    waiting = BufferBudget(limit=10)
    first, second = MergedOutput(waiting), MergedOutput(waiting)
    worker = WorkerId("n1/1")
    first.put(worker, "12345678")
    second.put(worker, "123")
    assert "3 characters of output are left out" in next(second.take()).text
    first.drop()
    second.put(worker, "1234567890")
    assert [lines.text for lines in second.take()] == ["1234567890"]
    assert waiting.chars == 0
