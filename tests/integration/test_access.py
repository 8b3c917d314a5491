"""Every method, with every kind of good and bad credentials, over real connections."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from elastic.coord.roles import RULES, Role
from elastic.core.messages import Welcome
from elastic.runtime.access import Access, find_access
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.integration.coordinator import (
    Coordinator,
    ScriptedAgent,
    User,
    elastic_coord,
    node,
    spec,
)
from tests.integration.floods import PREFACE, strangers
from tests.integration.locked import (
    audit_lines,
    authority,
    call,
    certificate,
    token,
    wait_audited,
)
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
SERVED = [method for method in RULES if not method.endswith("Health/List")]
GUARDED = [method for method in SERVED if RULES[method].roles is not None]
CROWD = 500
REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED"}


class Tokens:
    """A coordinator that takes tokens with roles."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        self.audit = folder / "audit.jsonl"
        self.of = {role: token(self.path, role, f"the-{role.value}") for role in Role}
        self.expired = token(self.path, Role.ADMIN, expires_ns=2)
        self.revoked = token(self.path, Role.ADMIN, revoked_ns=2)
        args = ("--tokens", str(self.path), "--audit-log", str(self.audit))
        self.coordinator = Coordinator(folder / "c", args=args)


class Mutual:
    """A coordinator that asks for certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = authority(folder / "ours")
        self.strange = authority(folder / "theirs")
        self.of = {
            role: certificate(self.folder, f"the-{role.value}", role)
            for role in (Role.NODE, Role.SUBMIT, Role.READ)
        }
        self.of[Role.ADMIN] = find_access(tls_dir=str(self.folder / "coordinator"))
        self.coordinator = Coordinator(
            folder / "c", args=("--tls-dir", str(self.folder / "coordinator"))
        )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokens]:
    made = Tokens(tmp_path_factory.mktemp("tokens"))
    with made.coordinator:
        yield made


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutual]:
    made = Mutual(tmp_path_factory.mktemp("mutual"))
    with made.coordinator:
        yield made


# ------------------------------------------------------------------ every method, every key


@pytest.mark.parametrize("method", GUARDED)
async def test_without_a_good_token_no_method_is_answered(tokens: Tokens, method: str) -> None:
    address = tokens.coordinator.address
    for shown, says in (
        ("", "came without a token"),
        ("guessed", "wrong token"),
        (tokens.of[Role.ADMIN][:-1] + "~", "wrong token"),
        (tokens.expired, "has expired"),
        (tokens.revoked, "was revoked"),
    ):
        outcome = await call(address, method, access=Access(shown))
        assert outcome.code == "UNAUTHENTICATED", (shown, outcome)
        assert says in outcome.details
        assert "--token-file" in outcome.details, "it must say what to do"


@pytest.mark.parametrize("method", SERVED)
async def test_a_token_opens_what_its_role_may_call(tokens: Tokens, method: str) -> None:
    for role, shown in tokens.of.items():
        outcome = await call(tokens.coordinator.address, method, access=Access(shown))
        roles = RULES[method].roles
        if roles is None or role in roles:
            assert outcome.code not in REFUSALS, (role, outcome)
        else:
            assert outcome.code == "PERMISSION_DENIED", (role, outcome)
            assert f"the-{role.value} ({role.value})" in outcome.details
            assert "--role" in outcome.details


@pytest.mark.parametrize("method", SERVED)
async def test_a_certificate_opens_what_its_role_may_call(mutual: Mutual, method: str) -> None:
    for role, access in mutual.of.items():
        outcome = await call(mutual.coordinator.address, method, access=access)
        roles = RULES[method].roles
        refused = roles is not None and role not in roles
        assert (outcome.code == "PERMISSION_DENIED") == refused, (role, outcome)
        assert outcome.code != "UNAVAILABLE", (role, outcome)


@pytest.mark.parametrize("method", SERVED)
async def test_without_a_certificate_of_this_authority_no_method_is_reached(
    mutual: Mutual, method: str
) -> None:
    ca = str(mutual.folder / "ca.crt")
    theirs = mutual.strange / "coordinator"
    stranger = find_access(
        tls_cert=str(theirs / "tls.crt"), tls_key=str(theirs / "tls.key"), tls_ca=ca
    )
    for access in (Access(), find_access(tls_ca=ca), stranger, find_access(tls_dir=str(theirs))):
        outcome = await call(mutual.coordinator.address, method, access=access, metadata=())
        assert outcome.code == "UNAVAILABLE", outcome


async def test_a_certificate_that_is_over_opens_nothing(mutual: Mutual, tmp_path: Path) -> None:
    old = certificate(mutual.folder, "old", Role.READ, days=1e-9)
    outcome = await call(mutual.coordinator.address, "/elastic.v1.Jobs/List", access=old)
    assert outcome.code == "UNAVAILABLE"


async def test_a_certificate_of_this_authority_without_a_role_is_refused(
    mutual: Mutual, tmp_path: Path
) -> None:
    from tests.integration.odd_certificates import without_role

    access = without_role(mutual.folder, tmp_path)
    outcome = await call(mutual.coordinator.address, "/elastic.v1.Jobs/List", access=access)
    assert outcome.code == "UNAUTHENTICATED"
    assert "certs issue --role" in outcome.details


async def test_a_token_beside_a_certificate_adds_nothing_to_it(
    mutual: Mutual, tmp_path: Path
) -> None:
    shown = token(tmp_path / "tokens.json", Role.SUBMIT)
    of_node = Access(shown, tls=mutual.of[Role.NODE].tls)
    for method in ("/elastic.v1.Jobs/Submit", "/elastic.v1.Jobs/List"):
        outcome = await call(mutual.coordinator.address, method, access=of_node)
        assert outcome.code == "PERMISSION_DENIED", outcome
        assert "the-node (node)" in outcome.details


# ------------------------------------------------------------------------- nodes as themselves


async def test_a_node_attaches_under_the_name_in_its_token_only(tokens: Tokens) -> None:
    shown = token(tokens.path, Role.NODE, "gpu-7")
    await wait_audited(tokens.audit, action="token created")
    address = tokens.coordinator.address
    async with ScriptedAgent(address, node("gpu-7"), token=shown) as agent:
        await agent.hello()
        assert (await agent.hear(Welcome)).coordinator
    async with ScriptedAgent(address, node("gpu-8"), token=shown) as agent:
        await agent.hello()
        code, details = await agent.end()
        assert code == "PERMISSION_DENIED"
        assert "--node-id gpu-7" in details


async def test_a_revoked_token_ends_an_agents_stream_and_a_watch(tokens: Tokens) -> None:
    address = tokens.coordinator.address
    of_node = token(tokens.path, Role.NODE, "gone")
    of_user = token(tokens.path, Role.SUBMIT, "leaver")
    await wait_audited(tokens.audit, what=f"token {of_user.split('_')[1]} leaver (submit)")
    async with (
        ScriptedAgent(address, node("gone"), token=of_node) as agent,
        User(address, token=of_user) as user,
        User(address, token=tokens.of[Role.ADMIN]) as owner,
    ):
        await agent.join()
        job = await user.submit(spec("watched", workers=(50, 50)))
        ended: list[str] = []

        async def watch() -> None:
            try:
                await user.watch(job, [])
            except grpc.aio.AioRpcError as error:
                ended.append(f"{error.code().name} {error.details()}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            for name in ("gone", "leaver"):
                done = elastic_coord("tokens", "revoke", name, "--tokens", str(tokens.path))
                assert done.returncode == 0, done.stderr
            code, details = await agent.end()
        assert (code, "was revoked" in details) == ("UNAUTHENTICATED", True)
        assert ended[0].startswith("UNAUTHENTICATED")
        await owner.wait_node("gone", lambda n: n is None or n.phase.value != "ready")
        await owner.stop(job)
    line = await wait_audited(tokens.audit, action="token revoked")
    assert "gone" in str(line) or "leaver" in str(line)


async def test_what_is_longer_than_its_method_can_need_is_not_parsed_and_no_bug(
    tokens: Tokens,
) -> None:
    address, admin = tokens.coordinator.address, Access(tokens.of[Role.ADMIN])
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for method, message, access, told in (
        ("/grpc.health.v1.Health/Check", named(1 << 15), Access(""), "at most 4096"),
        ("/grpc.health.v1.Health/List", b"", Access(""), "UNIMPLEMENTED"),
        ("/elastic.v1.Jobs/Get", named(1 << 17), admin, "at most 65536"),
        ("/elastic.v1.Jobs/Get", named(1 << 15), admin, "NOT_FOUND"),
        (reflection, b"\xff" * 9, admin, "INVALID_ARGUMENT"),
    ):
        outcome = await call(address, method, access=access, message=message)
        assert told in f"{outcome.code} {outcome.details}", (method, str(outcome)[:300])
        assert len(outcome.details) < 1000


def named(length: int) -> bytes:
    """Return a message whose first field is a long text."""
    return jobs_pb2.GetJobRequest(job="a" * length).SerializeToString()


# ------------------------------------------------------------------------------------ traces


async def test_changes_and_refusals_leave_a_line_and_no_secret(tokens: Tokens) -> None:
    address = tokens.coordinator.address
    async with (
        User(address, token=tokens.of[Role.SUBMIT]) as user,
        User(address, token=tokens.of[Role.READ]) as reader,
    ):
        job = await user.submit(spec("audited", workers=(50, 50)))
        with pytest.raises(grpc.aio.AioRpcError):
            await reader.stop(job)
        await user.stop(job)
    async with User(address, token=tokens.of[Role.ADMIN]) as admin:
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.drain("no-such-node", 1.0)
    what = f"name=audited job_id={job}"
    submitted = await wait_audited(tokens.audit, action="Submit", outcome="ok", what=what)
    fields = submitted["fields"]
    assert fields["who"] == "token the-submit (submit)"
    assert fields["peer"].startswith("ipv4:127.0.0.1:")
    await wait_audited(tokens.audit, action="Stop", outcome="ok", what=f"job={job}")
    drained = await wait_audited(tokens.audit, action="Drain", what="node=no-such-node")
    assert drained["fields"]["outcome"] != "ok"
    refused = [line for line in audit_lines(tokens.audit) if line["event"] == "call_refused"]
    assert refused
    kinds = [
        (line["fields"]["peer"].rpartition(":")[0], line["fields"]["kind"]) for line in refused
    ]
    assert len(kinds) == len(set(kinds)), "one line for a host and a kind of reason in a minute"
    text = tokens.audit.read_text() + tokens.coordinator.log() + tokens.path.read_text()
    for shown in (*tokens.of.values(), tokens.expired, tokens.revoked):
        assert shown.split("_", 2)[2] not in text


# ---------------------------------------------------------------------------------- rotation


async def test_a_new_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    folder = authority(tmp_path / "ours")
    reader = certificate(folder, "r", Role.READ)
    args = ("--tls-dir", str(folder / "coordinator"))
    method = "/elastic.v1.Jobs/List"
    with Coordinator(tmp_path / "c", args=args) as running:
        serial = await served_serial(running.address, reader)
        (folder / "coordinator" / "tls.crt").write_text("-----BEGIN nothing\n")
        assert (await call(running.address, method, access=reader)).code == "OK"
        running.wait_logged("certificate_unusable")
        done = elastic_coord(
            *("certs", "issue", str(folder), "--name", "coordinator", "--role", "admin"),
            *("--host", "127.0.0.1"),
        )
        assert done.returncode == 0, done.stderr
        assert await served_serial(running.address, reader) != serial
        running.wait_logged("certificate_renewed")


async def served_serial(address: str, access: Access) -> int:
    """The serial number of the certificate that a coordinator shows now."""
    from cryptography import x509

    assert access.tls is not None
    assert access.tls.cert is not None
    context = ssl.create_default_context(cafile=access.tls.ca)
    context.load_cert_chain(access.tls.cert, access.tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    stream = await anyio.connect_tcp(host, int(port), ssl_context=context, tls_hostname=host)
    shown = stream.extra(anyio.streams.tls.TLSAttribute.peer_certificate_binary)
    await anyio.aclose_forcefully(stream)
    return x509.load_der_x509_certificate(shown).serial_number


async def test_a_coordinator_is_not_believed_under_another_host_name(tmp_path: Path) -> None:
    folder = authority(tmp_path / "ours")
    reader = certificate(folder, "r", Role.READ)
    certificate(folder, "coordinator", Role.ADMIN, hosts=("coord.example",))
    args = ("--tls-dir", str(folder / "coordinator"))
    with Coordinator(tmp_path / "c", args=args) as running:
        outcome = await call(running.address, "/elastic.v1.Jobs/List", access=reader)
        assert outcome.code == "UNAVAILABLE"


async def test_tokens_over_tls_need_no_certificate_of_the_caller(tmp_path: Path) -> None:
    folder = authority(tmp_path / "pki")
    shown = token(tmp_path / "tokens.json", Role.READ)
    ours = folder / "coordinator"
    args = ("--tls-cert", str(ours / "tls.crt"), "--tls-key", str(ours / "tls.key"))
    args += ("--tokens", str(tmp_path / "tokens.json"))
    tls = find_access(tls_ca=str(folder / "ca.crt")).tls
    with Coordinator(tmp_path / "c", args=args) as running:
        method = "/elastic.v1.Jobs/List"
        assert (await call(running.address, method, access=Access(shown, tls=tls))).code == "OK"
        without = await call(running.address, method, access=Access(tls=tls))
        assert without.code == "UNAUTHENTICATED"
        assert (await call(running.address, method, access=Access(shown))).code == "UNAVAILABLE"


def test_a_stranger_without_a_handshake_leaves_no_line_each_time(mutual: Mutual) -> None:
    host, _, port = mutual.coordinator.address.rpartition(":")
    before = mutual.coordinator.log()
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    for _ in range(5):
        with (
            socket.create_connection((host, int(port)), timeout=DEADLINE_S) as plain,
            contextlib.suppress(OSError),
            unverified.wrap_socket(plain, server_hostname="elsewhere.example") as greeted,
        ):
            greeted.recv(1)
    said = mutual.coordinator.log().removeprefix(before)
    assert "andshake" not in said
    assert "elsewhere" not in said


GREETINGS_TLS = {
    "nothing": b"",
    "half of a hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    "garbage": b"\x16\x03\x01" + b"\xff" * 300,
    "the clear": PREFACE,
}


@pytest.mark.parametrize("greeting", GREETINGS_TLS)
async def test_a_crowd_that_never_ends_its_handshake_keeps_nobody_out(
    mutual: Mutual, greeting: str
) -> None:
    address, method = mutual.coordinator.address, "/elastic.v1.Jobs/List"
    with strangers(address, GREETINGS_TLS[greeting], CROWD):
        outcome = await call(address, method, access=mutual.of[Role.READ])
        assert outcome.code == "OK", outcome
