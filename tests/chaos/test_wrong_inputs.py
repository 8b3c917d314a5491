"""What is wrong is said clearly, costs the right exit code, and leaves nothing running.

One cluster with a token serves all tests; scripts of their own cluster: test_driver_scripts.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest

import elastic
from elastic import train
from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase, Resources
from elastic.core.view import JobView
from elastic.errors import (
    CoordinatorUnreachable,
    NameTaken,
    NotAuthorized,
    StorageError,
    TrainingFailed,
    UsageError,
)
from elastic.testing.local_cluster import LocalCluster, is_running
from elastic.train.torch import TorchTrainer
from tests.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
BAD = Path(__file__).with_name("bad_script.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text("a-long-random-word")
    with LocalCluster(
        nodes=2, workers_per_node=4, spares=1, directory=directory, token_file=token
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_job_is_left(cluster: LocalCluster) -> Iterator[None]:
    yield
    cluster.stop_jobs()


@pytest.fixture
def _connected(cluster: LocalCluster) -> Iterator[None]:
    elastic.init(cluster.address, token_file=cluster.token_file)
    yield
    elastic.shutdown()


def script_job(
    tmp_path: Path, name: str, *args: str, script: Path = BAD, run: Path | None = None, **more: Any
) -> JobSpec:
    return JobSpec(
        job_id=JobId(""),
        name=f"{tmp_path.name}-{name}"[:100],
        entry=Entry(EntryKind.SCRIPT, str(script), args=args, working_dir=str(tmp_path)),
        min_workers=1,
        max_workers=1,
        run_path=str(run or tmp_path / name),
        **more,
    )


def end_of(cluster: LocalCluster, job_id: str) -> JobView:
    """Return the job once it has ended and its workers are gone."""
    ended = ("succeeded", "failed", "stopped")
    return cluster.wait(
        job_id, lambda v: v.record.phase.value in ended and not v.workers, "the end"
    )


def command(cluster: LocalCluster, *args: str, token_file: str | None = None) -> Any:
    """Run `elastic` and return what it said; it has to end by itself."""
    token = cluster.token_file if token_file is None else token_file
    tokens = ("--token-file", token) if token else ()
    return subprocess.run(
        [sys.executable, "-m", "elastic.client.cli", "-c", cluster.address, *tokens, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
    )


def trainer(function: Callable[..., Any], storage: Path | str, **options: Any) -> TorchTrainer:
    run = {name: options.pop(name) for name in ("name", "failure_config") if name in options}
    return TorchTrainer(
        function,
        scaling_config=train.ScalingConfig(**{"num_workers": 1, **options}),
        run_config=train.RunConfig(storage_path=storage, **run),
    )


# ------------------------------------------------------------------------------- scripts that fail


def test_scripts_that_go_wrong_end_their_jobs_and_say_how(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """All at once: what takes time is to start workers."""
    syntax, imports = tmp_path / "syntax.py", tmp_path / "imports.py"
    syntax.write_text("print('never'\nfor\n")
    imports.write_text("import json\nimport no_such_module\n")
    specs = {
        "code": script_job(tmp_path, "code", "leave_with_3"),
        "exit": script_job(tmp_path, "exit", "leave_at_once"),
        "well": script_job(tmp_path, "well", "leave_well"),
        "syntax": script_job(tmp_path, "syntax", script=syntax),
        "imports": script_job(tmp_path, "imports", script=imports),
    }
    jobs = {name: cluster.client.submit(spec) for name, spec in specs.items()}
    ends = {name: end_of(cluster, job_id) for name, job_id in jobs.items()}
    assert ends["well"].record.phase is JobPhase.SUCCEEDED, ends["well"].reason
    for name, says in {
        "code": "SystemExit: 3",
        "exit": "exited with code 3",
        "syntax": "SyntaxError",
        "imports": "No module named 'no_such_module'",
    }.items():
        assert ends[name].record.phase is JobPhase.FAILED, name
        assert says in ends[name].record.reason
    tracebacks = {name: view.record.failure for name, view in ends.items()}
    for name, file in (("syntax", syntax), ("imports", imports), ("code", BAD)):
        failure = tracebacks[name]
        assert failure is not None
        assert str(file) in failure.traceback
        first = next(line for line in failure.traceback.splitlines() if "File" in line)
        assert "elastic" not in first.replace(str(ROOT), "")


def test_a_failing_script_is_told_once_and_last_with_exit_code_1(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    storage = ("--storage-path", str(tmp_path))
    done = command(cluster, "submit", str(BAD), *storage, "--", "fail")
    assert done.returncode == 1
    said = done.stderr.decode()
    assert said.count("ValueError: bad batch at step 7\n") == 1
    assert said.rstrip().endswith("ValueError: bad batch at step 7")
    assert "Traceback" not in done.stdout.decode()
    assert len((next(tmp_path.iterdir()) / "metrics.jsonl").read_text().splitlines()) == 7


def test_noise_comes_through_as_it_was_printed(cluster: LocalCluster, tmp_path: Path) -> None:
    storage = ("--storage-path", str(tmp_path))
    done = command(cluster, "submit", str(BAD), *storage, "--", "make_noise")
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"x" * 300_000 + b"\n" in done.stdout
    assert b"no newline at the end" in done.stdout
    assert b"succeeded" in done.stderr


@pytest.mark.usefixtures("_connected")
def test_an_error_is_tried_again_as_often_as_it_may_come(tmp_path: Path) -> None:
    def fail_by_and_by() -> None:
        path = Path(train.get_context().get_storage()) / "attempts"
        attempts = path.read_text() if path.exists() else ""
        path.write_text(attempts + "x")
        for step in range(7):
            train.report({"step": step})
        # The second and the third attempt fail in the same way.
        raise ValueError(f"bad batch after {min(len(attempts), 1)}")

    again = train.FailureConfig(max_failures=2)
    with pytest.raises(TrainingFailed, match="failure 3, max_failures=2") as caught:
        trainer(fail_by_and_by, tmp_path, name="again", failure_config=again).fit()
    assert (tmp_path / "again" / "attempts").read_text() == "xxx"
    assert caught.value.traceback.rstrip().endswith("ValueError: bad batch after 1")
    assert "(rank 0)" in caught.value.worker
    result = caught.value.result
    assert isinstance(result, train.Result)
    assert len(result.history) == 21


@pytest.mark.root
def test_a_full_disk_fails_the_job_by_name(cluster: LocalCluster, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.decode()}")
    try:
        job_id = cluster.client.submit(script_job(tmp_path, "big", "checkpoint", run=small / "big"))
        failure = end_of(cluster, job_id).record.failure
        assert failure is not None
        assert failure.error_type.endswith("StorageError")
        assert f"{small}/big" in failure.message
        assert "disk full" in failure.message
        assert not list(small.glob("big/checkpoints/*/_COMMITTED"))
        with (small / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(1 << 12)):
                continue
        storage = ("--storage-path", str(small))
        done = command(cluster, "submit", str(BAD), *storage, "--", "leave_well")
        assert done.returncode == 78, done.stderr
        assert b"run.json: disk full" in done.stderr.splitlines()[-1]
        well = script_job(tmp_path, "well", "leave_well", run=small / "well")
        job_id = cluster.client.submit(well)
        # Metrics alone are no reason to lose what was trained.
        assert end_of(cluster, job_id).record.phase.value == "succeeded"
        said = command(cluster, "logs", job_id).stdout
        assert b"metrics_kept" in said
        assert b"disk full" in said
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# ------------------------------------------------------------------ what is refused before a start


@pytest.mark.usefixtures("_connected")
def test_what_cannot_work_is_refused_by_fit_and_leaves_nothing_behind(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    lock = threading.Lock()
    (tmp_path / "file").touch()
    storage = tmp_path / "storage"
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: trainer(lambda: lock.locked(), storage).fit(), UsageError, "cannot be sent"),
        (lambda: trainer(lambda a, b: None, storage), UsageError, "takes a, b"),
        (lambda: trainer(lambda: None, storage, num_workers=(3, 2)), UsageError, "min <= max"),
        (
            lambda: trainer(lambda: None, storage, accelerator_type="H999").fit(),
            UsageError,
            "H999.*known types.*H100",
        ),
        (lambda: trainer(lambda: None, tmp_path / "file").fit(), StorageError, "cannot be made"),
        (lambda: trainer(lambda: None, "nosuch://x").fit(), UsageError, "nosuch"),
        (lambda: elastic.init(), UsageError, "called already"),
    ]
    for call, kind, says in cases:
        with pytest.raises(kind, match=says):
            call()
    assert not storage.exists() or not list(storage.iterdir())
    assert not cluster.client.list(include_ended=False)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("submit", "/no/such/script.py"), 78, "/no/such/script.py is not a file"),
        (("submit", str(BAD), "--accelerator-type", "H999"), 78, "known types"),
        (("submit", str(BAD), "--storage-path", "/proc/nothing"), 78, "cannot be made"),
        (("stop", "nobody"), 2, "nobody"),
    ],
)
def test_a_command_that_cannot_work_says_so(
    cluster: LocalCluster, args: tuple[str, ...], code: int, says: str
) -> None:
    done = command(cluster, *args)
    assert (done.returncode, says in done.stderr.decode()) == (code, True), done.stderr.decode()
    assert done.stderr.count(b"\n") <= 3
    assert not cluster.client.list(include_ended=False)


@pytest.mark.usefixtures("_connected")
def test_a_name_is_used_once(cluster: LocalCluster, tmp_path: Path) -> None:
    waiting = script_job(tmp_path, "one", resources_per_worker=Resources.of({"LICENCE": 1}))
    job_id = cluster.client.submit(waiting)
    with pytest.raises(NameTaken, match=waiting.name):
        trainer(lambda: None, tmp_path / "other", name=waiting.name).fit()
    assert not list((tmp_path / "other").iterdir())
    cluster.client.stop(job_id)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "metrics.jsonl").touch()
    with pytest.raises(NameTaken, match="held exists already, is not empty"):
        trainer(lambda: None, tmp_path, name="held").fit()


def test_a_wrong_token_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("guess")
    for token in (wrong, None):
        with pytest.raises(NotAuthorized, match="token"):
            elastic.init(cluster.address, token_file=token)
        assert not elastic.is_initialized()
    with pytest.raises(UsageError, match="gone"):
        elastic.init(cluster.address, token_file=tmp_path / "gone")
    done = command(cluster, "ps", token_file=str(wrong))
    assert done.returncode == 78
    assert b"token" in done.stderr


def test_a_coordinator_that_is_not_there_is_told(cluster: LocalCluster) -> None:
    with socket.socket() as taken:  # Bound, and not listening: nobody else gets the port.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachable, match=address):
            elastic.init(address)
        done = subprocess.run(
            [sys.executable, "-m", "elastic.client.cli", "-c", address, "ps"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 69
        assert address in done.stderr.decode()


# ---------------------------------------------------------------------------------------- waiting


def test_a_wait_says_for_what_and_a_time_limit_ends_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    licence = script_job(tmp_path, "licence", resources_per_worker=Resources.of({"LICENCE": 2}))
    job_id = cluster.client.submit(licence)
    view = cluster.wait(job_id, lambda v: "LICENCE" in v.reason, "a reason")
    assert view.record.phase is JobPhase.PENDING
    options = ("--accelerator-type", "H100", "--storage-path", str(tmp_path), "--timeout", "1")
    done = command(cluster, "submit", str(BAD), *options, "--", "fail")
    assert done.returncode == 124
    assert "H100" in done.stderr.decode()
    assert "elastic " in done.stderr.decode().splitlines()[-1]
    status = command(cluster, "status", job_id)
    assert "LICENCE" in status.stdout.decode()


# ------------------------------------------------------------------------ stubborn train functions


@pytest.mark.usefixtures("_connected")
def test_code_that_catches_everything_is_left_all_the_same_and_no_child_stays(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A peer is killed while both members load data with processes and catch every Exception."""

    def stubborn(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        from elastic.train.torch import prepare_data_loader

        context = train.get_context()
        mark = Path(config["marks"]) / f"{context.get_generation()}-{context.get_world_rank()}"
        data = torch.utils.data.TensorDataset(torch.arange(4096))
        loader = prepare_data_loader(torch.utils.data.DataLoader(data, num_workers=2))
        for _ in range(10_000):
            for _ in loader:
                is_later = context.get_generation() > 1
                over = torch.tensor(float(is_later and Path(config["finish"]).exists()))
                try:
                    dist.all_reduce(over)  # All members end at the same place.
                    mark.touch()
                except Exception:
                    continue
                if over > 0:
                    return
                if is_later:
                    break

    marks, finish = tmp_path / "marks", tmp_path / "finish"
    marks.mkdir()
    stubborn_trainer = trainer(stubborn, tmp_path / "storage", name="stubborn", num_workers=(1, 2))
    stubborn_trainer.train_loop_config = {"marks": str(marks), "finish": str(finish)}
    spec = stubborn_trainer._spec("stubborn")
    job_id = cluster.client.submit(spec)
    cluster.wait(job_id, lambda _: len(list(marks.glob("1-*"))) == 2, "two members to train")
    pids = cluster.worker_pids(job_id)
    children = [c for pid in pids.values() for c in psutil.Process(pid).children(recursive=True)]
    assert len(children) >= 4
    victim, survivor = sorted(pids.values())
    os.kill(victim, signal.SIGKILL)
    cluster.wait(job_id, lambda v: v.record.generation > 1, "the next group")
    cluster.wait(job_id, lambda _: bool(list(marks.glob("[2-9]-0"))), "the next group to train")
    assert not is_running(survivor), "code outside of train.epochs() begins in a new process"
    finish.touch()
    view = end_of(cluster, job_id)
    assert view.record.phase is JobPhase.SUCCEEDED, view.record.failure
    _, left = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not [child for child in left if is_running(child.pid)]


@pytest.mark.usefixtures("_connected")
def test_calls_groups_and_callbacks_as_scripts_of_ray_have_them(tmp_path: Path) -> None:
    @elastic.remote
    def half(x: int) -> Fraction:
        if x % 2:
            raise ValueError(f"{x} is odd")
        return Fraction(x, 2)

    halves = elastic.get([half.remote(2), half.remote(half.remote(8))])
    assert halves == [1, 2]
    assert isinstance(halves[0], Fraction)
    with pytest.raises(ValueError, match="3 is odd") as caught:
        elastic.get(half.remote(3))
    assert isinstance(caught.value.__cause__, train.WorkerGroupError)

    class Heard(train.UserCallback):
        reports: list[Any] = []  # noqa: RUF012

        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            self.reports.append((metrics, checkpoint is not None))

    def work() -> None:
        import torch.distributed as dist

        rank = train.get_context().get_world_rank()
        dist.destroy_process_group()  # Which hides it from torch's functions alone.
        train.collective.barrier()
        assert train.collective.broadcast_from_rank_zero(rank) == 0
        assert not dist.is_initialized()
        keys = train.collective.store()
        if rank == 0:
            keys.set("word", "hello")
        assert keys.get("word") == b"hello"
        part = train.Checkpoint.from_dict({"rank": rank}) if rank == 1 else None
        train.report({"rank": rank}, checkpoint=part)
        assert len(train.get_all_reported_checkpoints()) == 1
        train.report({"rank": rank})
        print(f"rank {rank} is done")

    run = train.RunConfig(
        name="group", storage_path=tmp_path, callbacks=[Heard()], log_to_file="printed"
    )
    scaling = train.ScalingConfig(num_workers=2)
    result = train.DataParallelTrainer(work, scaling_config=scaling, run_config=run).fit()
    both = [{"rank": 0}, {"rank": 1}]
    assert Heard.reports == [(both, True), (both, False)]
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict() == {"rank": 1}
    printed = (tmp_path / "group" / "printed").read_text()
    assert "rank 0 is done" in printed
    assert "rank 1 is done" in printed
