"""Which store a URL names, and what is said of one that names none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from elastic.store.etcd_link import EtcdAccess
from elastic.store.open import etcd_address, open_store, sqlite_path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:coord.db", "coord.db"),
        ("sqlite:./a b/coord.db", "a b/coord.db"),
        ("sqlite:/var/lib/elastic/coord.db", "/var/lib/elastic/coord.db"),
        ("sqlite:///var/lib/elastic/coord.db", "/var/lib/elastic/coord.db"),
        ("sqlite:odd:name?#.db", "odd:name?#.db"),
    ],
)
def test_a_sqlite_url_names_a_file(url: str, path: str) -> None:
    assert sqlite_path(url) == Path(path)


@pytest.mark.parametrize(
    ("url", "endpoints", "root"),
    [
        ("etcd://h1", ("h1:2379",), ""),
        ("etcd://h1,h2,h3", ("h1:2379", "h2:2379", "h3:2379"), ""),
        ("etcd://h1:1,h2:65535/team/a", ("h1:1", "h2:65535"), "team/a"),
        ("etcd://h1:1, h1:1,h2:2/", ("h1:1", "h2:2"), ""),
        ("etcd://[::1]:2,[fe80::1]/x/", ("[::1]:2", "[fe80::1]:2379"), "x"),
        ("etcd://10.0.0.1:2379/p", ("10.0.0.1:2379",), "p"),
    ],
)
def test_an_etcd_url_names_endpoints_and_a_root(
    url: str, endpoints: tuple[str, ...], root: str
) -> None:
    assert etcd_address(url) == (endpoints, root)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "expected sqlite:PATH"),
        ("coord.db", "expected sqlite:PATH"),
        ("/var/coord.db", "expected sqlite:PATH"),
        ("redis://h:1", "unknown kind 'redis'"),
        ("SQLITE:x", "unknown kind 'SQLITE'"),
        ("memory", "memory:"),
        ("memory:x", "nothing follows"),
        ("memory://", "nothing follows"),
        ("sqlite:", "names no file"),
        ("sqlite:folder/", "names no file"),
        ("sqlite:a\0b", "names no file"),
        ("sqlite://host/coord.db", "names a host"),
        ("sqlite:~/coord.db", "write out the path"),
        ("etcd:h1", "etcd://host:port"),
        ("etcd:/h1", "etcd://host:port"),
        ("etcd://", "'' is no host:port"),
        ("etcd:///root", "'' is no host:port"),
        ("etcd://h1,,h2", "'' is no host:port"),
        ("etcd://h1:0", "port '0'"),
        ("etcd://h1:65536", "port '65536'"),
        ("etcd://h1:", "port ''"),
        ("etcd://h1:²", "port '²'"),
        ("etcd://:2379", "is no host:port"),
        ("etcd://::1:2379", "is no host:port"),
        ("etcd://[::1", "is no host:port"),
        ("etcd://h 1:2379", "is no host:port"),
        ("etcd://h1/root?tls=1", "no plain path"),
        ("etcd://h1/ro\not", "no plain path"),
    ],
)
def test_a_url_that_names_no_store_is_refused_with_what_is_expected(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(open_store(url))
    assert words in str(refused.value)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(open_store("etcd://root:hunter2@h1:2379"))
    assert "hunter2" not in str(refused.value)
    assert "--store-user" in str(refused.value)


def test_secrets_of_an_access_are_not_shown() -> None:
    access = EtcdAccess("root", "hunter2", key=b"PRIVATE")
    assert "hunter2" not in repr(access)
    assert "PRIVATE" not in repr(access)


@pytest.mark.parametrize("url", ["memory:", "sqlite:coord.db"])
def test_a_store_of_this_machine_takes_no_user(url: str) -> None:
    with pytest.raises(ConfigError, match="only etcd does"):
        asyncio.run(open_store(url, access=EtcdAccess("root", "secret")))
