"""What a worker's group refuses, and how its sockets are told from everyone else's."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as kept_all_reduce
from torch.distributed import device_mesh
from torch.distributed import get_rank as kept_get_rank
from torch.distributed import is_initialized as kept_is_initialized
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import ConfigError, GroupError
from elastic.worker.group import c10d
from elastic.worker.group.gloo_sockets import (
    WatchedDescriptor,
    any_hung_up,
    end_reading,
    find_event_loop,
    received_bytes,
    socket_inodes,
)
from elastic.worker.group.group import GroupSpec, ProcessGroups
from elastic.worker.group.store_server import StoreServer
from elastic.worker.process.early_run import joining_on_demand

PLACE = {
    "generation": 1,
    "rank": 0,
    "world_size": 1,
    "leader_address": "127.0.0.1:1",
    "backend": "gloo",
    "host": "127.0.0.1",
    "timeout_s": 10.0,
    "job_id": "job",
    "key": "a secret",
}


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def watched(sock: socket.socket) -> WatchedDescriptor:
    return WatchedDescriptor(sock.fileno(), os.fstat(sock.fileno()).st_ino)


def test_groups_without_meshes_import_nothing_to_forget_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("tensor"))
    monkeypatch.setattr(c10d, "importlib", None)
    c10d.forget_all_groups()


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 0},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"backend": "mpi"},
        {"key": ""},
        {"timeout_s": 0.0},
        {"form_timeout_s": -1.0},
        {"timeout_s": float("nan")},
    ],
)
def test_a_place_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        GroupSpec(**{**PLACE, **wrong})  # type: ignore[arg-type]


def test_a_store_cannot_listen_where_this_machine_is_not() -> None:
    with pytest.raises(GroupError, match=r"cannot listen on 192\.0\.2\.77"):
        StoreServer("192.0.2.77")


def test_torch_without_a_name_that_we_need_is_refused() -> None:
    with pytest.raises(GroupError, match=r"has no module\.Missing.*install torch>=2\.9"):
        c10d.look_up(type("module", (), {}), "Missing")


@contextlib.contextmanager
def taken() -> Iterator[tuple[ProcessGroups, Callable[[], None]]]:
    """Take torch's functions; yields the groups of this process, and what forms one of one."""
    groups, server = ProcessGroups(), StoreServer("127.0.0.1")
    generations = itertools.count(1)

    def form() -> None:
        generation = next(generations)
        server.admit(generation, PLACE["key"])  # type: ignore[arg-type]
        changed = {"leader_address": server.address, "generation": generation}
        groups.form(GroupSpec(**{**PLACE, **changed}))  # type: ignore[arg-type]

    try:
        yield groups, form
    finally:
        groups.close()
        server.close()


@pytest.mark.parametrize(
    ("named", "is_ours"),
    [({}, True), ({"enable_reconfigure": False}, True), ({"enable_reconfigure": True}, False)],
)
def test_the_builders_of_all_torchs_get_our_device(named: dict[str, bool], is_ours: bool) -> None:
    made = c10d.GlooBuilder(lambda *_, **__: False, lambda *_: True)
    assert made("store", 0, 1, timeout=timedelta(seconds=1), **named) is is_ours


def test_a_torch_that_builds_gloo_in_another_way_forms_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = c10d.GlooBuilder.__call__
    monkeypatch.setattr(c10d.GlooBuilder, "__call__", lambda one, *args, **_: call(one, *args))
    with taken() as (_, form), pytest.raises(GroupError, match=r"built its gloo .* install torch>"):
        form()


def test_torch_gets_its_own_functions_back() -> None:
    names = ("init_process_group", "destroy_process_group")
    before = [getattr(dist, name) for name in names]
    hook = sys.excepthook
    with taken() as (_, form):
        assert dist.init_process_group is not before[0]
        assert device_mesh.init_process_group is dist.init_process_group  # type: ignore[attr-defined]
        form()
        assert dist.is_initialized()
        assert device_mesh.DeviceMesh(device_type="cpu", mesh=[0]).size() == 1
    assert [getattr(dist, name) for name in names] == before
    assert device_mesh.init_process_group is before[0]  # type: ignore[attr-defined]
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_script_is_warned_only_of_a_backend_that_the_group_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with taken() as (_, form):
        form()
        for same in (None, "gloo", "cpu:gloo"):
            dist.init_process_group(same)
        assert "backend_differs" not in caplog.text
        dist.init_process_group("cuda:nccl,cpu:gloo")
        assert "backend_differs asked=cuda:nccl,cpu:gloo formed=gloo" in caplog.text


def test_a_script_finds_no_group_before_it_asks_for_one_and_behind_its_end() -> None:
    with taken() as (groups, form):
        form()
        asks: tuple[Callable[[], Any], ...] = (
            dist.init_process_group,
            lambda: device_mesh.init_device_mesh("cpu", (1,)),
            groups.show,  # It turns out to use this library.
        )
        for ask in asks:
            groups.hide()
            assert not dist.is_initialized()
            ask()
            assert dist.get_world_size() == 1
        dist.destroy_process_group()
        groups.show()
        assert not dist.is_initialized()
        with c10d.shown_group() as is_there:
            assert is_there
            assert dist.get_world_size() == 1
        assert not dist.is_initialized()
        assert c10d.default_store() is not None
        groups.drop()
        with c10d.shown_group() as is_there:
            assert not is_there
        assert c10d.default_store() is None


def test_a_script_ahead_of_its_group_joins_it_by_any_name_that_it_has_kept() -> None:
    def join() -> None:
        put_back()
        form()

    with taken() as (groups, form):
        begin, end = dist.init_process_group, dist.destroy_process_group
        asks: tuple[Callable[[], Any], ...] = (
            kept_is_initialized,
            kept_get_rank,
            lambda: kept_all_reduce(torch.ones(1)),
            lambda: begin("gloo", world_size=1),
            lambda: DistributedDataParallel(torch.nn.Linear(1, 1)),
            end,
        )
        for ask in asks:
            with joining_on_demand(join) as put_back:
                assert dist.is_initialized()
                assert groups.spec is None
                ask()
                assert groups.spec is not None
            assert dist.is_initialized() is (ask is not end)
            groups.drop()


def test_there_is_no_store_and_no_hang_up_without_a_group() -> None:
    groups = ProcessGroups()
    assert not groups.peer_hung_up()
    assert groups.spec is None
    with pytest.raises(GroupError, match="no group is formed"):
        _ = groups.store
    groups.close()


def test_a_hang_up_of_the_peer_is_seen_and_silence_is_none() -> None:
    near, far = connected()
    with near, far:
        one = watched(near)
        assert not any_hung_up([one])
        far.sendall(b"unread")
        assert not any_hung_up([one])
        far.shutdown(socket.SHUT_RDWR)
        assert any_hung_up([one])


def test_what_has_come_over_connections_is_counted_also_when_nobody_reads_it() -> None:
    near, far = connected()
    with near, far, socket.create_server(("127.0.0.1", 0)) as listener:
        ones = [watched(near), watched(listener)]
        before = received_bytes(ones)
        far.sendall(bytes(1000))
        near.recv(1)
        assert received_bytes(ones) == before + 1000


def test_a_socket_that_we_closed_counts_as_hung_up() -> None:
    near, far = connected()
    one = watched(near)
    near.close()
    far.close()
    assert any_hung_up([one])


def test_an_end_of_reading_lets_the_owner_go_on_sending() -> None:
    near, far = connected()
    with near, far:
        (handle,) = end_reading([watched(near)])
        assert near.recv(1) == b""
        near.sendall(b"on its way")
        assert far.recv(100) == b"on its way"
        handle.close()


def test_a_server_of_somebody_else_is_not_taken_for_gloos() -> None:
    known = socket_inodes()
    one, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll, one, other:
        epoll.register(listener, select.EPOLLIN)
        epoll.register(one, select.EPOLLIN)
        assert find_event_loop(known) is None
        device = c10d.private_names().gloo.create_device(hostname="127.0.0.1")
        loop = find_event_loop(known)
        assert loop is not None
        assert loop.descriptor != epoll.fileno()
        assert len(loop.watched()) == 2
        del device
