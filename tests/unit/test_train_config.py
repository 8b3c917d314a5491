"""Configurations of a run: what is refused, and in which words; results and checkpoints."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem, S3FileSystem

from elastic.errors import ConfigError, StorageError, UsageError
from elastic.storage.options import VARIABLE, as_environment, options_of, remember, take
from elastic.train import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    PeerReplication,
    Result,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)
from elastic.train.config import TorchConfig

s3 = fsspec.get_filesystem_class("s3")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScalingConfig(num_workers=(3, 2)), r"\(3, 2\).*1 <= min <= max"),
        (lambda: ScalingConfig(num_workers=-1), "-1.*1 <= min <= max"),
        (lambda: ScalingConfig(num_workers=(0, 2)), r"\(0, 2\).*1 <= min"),
        (lambda: ScalingConfig(num_workers=True), "True.*an int"),
        (lambda: ScalingConfig(num_workers="2"), "'2'.*an int"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=2.0), "2.0.*an int"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=()), r"\(\).*or \(min, max\)"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=(1, 2, 3)), "min, max"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(placement_strategy="pack"), "'pack'.*PACK, "),
        (lambda: ScalingConfig(resources_per_worker={"CPU": -1}), "CPU=-1.*>= 0"),
        (lambda: ScalingConfig(resources_per_worker={"CPU": float("nan")}), "CPU=nan"),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}), "leave GPU out"),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 1}), "pass use_gpu=True"),
        (lambda: ScalingConfig(label_selector=[{"a": "1"}, {"a": "2"}]), "a list of 1 equal"),
        (lambda: ScalingConfig(num_workers=2, label_selector=[{"a": "1"}]), "a list of 2 equal"),
        (lambda: FailureConfig(fail_fast=True, max_failures=1), "fail_fast=True: expected False"),
        (lambda: CheckpointConfig(checkpoint_frequency=-2), "checkpoint_frequency=-2: .*>= 0"),
        (lambda: RunConfig(stop={"loss": "small"}), "stop=.*small.*a dict of numbers by metric"),
        (lambda: RunConfig(log_to_file="a/b"), "log_to_file='a/b': expected True, the name"),
        (lambda: RunConfig(storage_path="b/runs", storage_filesystem="s3"), "'s3': expected a fi"),
        (lambda: DataConfig(datasets_to_split={}), "={}: expected 'all', or a list"),
        (lambda: RunConfig(storage_path="s3://b/c?color=red"), "no settings after .*region"),
        (lambda: RunConfig(storage_path="gs://b/c?region=x"), "no settings after "),
        (lambda: RunConfig(worker_runtime_env={"pip": ["x"]}), "'pip'"),
        (lambda: LoggingConfig(log_level="LOUD"), "log_level='LOUD': expected one of DEBUG"),
        (lambda: SyncConfig(upload_dir="s3://b"), "upload_dir='s3://b': expected None"),
        (lambda: ScalingConfig(num_workers=3, workers_per_replica=2), "replica=2.*divides"),
        (lambda: ScalingConfig(workers_per_replica=0), "workers_per_replica=0"),
        (lambda: FailureConfig(max_failures=-2), "-2.*for ever"),
        (lambda: FailureConfig(max_failures=None), "None.*an int"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(num_to_keep=0), "num_to_keep=0.*>= 1"),
        (lambda: CheckpointConfig(every_n_steps=0), "every_n_steps=0.*>= 1"),
        (lambda: CheckpointConfig(every_n_steps=2.5), "every_n_steps=2.5.*int"),
        (lambda: CheckpointConfig(every_s=0), "every_s=0.*> 0"),
        (lambda: CheckpointConfig(every_s="60"), "every_s='60'.*seconds"),
        (lambda: CheckpointConfig(checkpoint_score_order="best"), "'best'.*max or min"),
        (lambda: RunConfig(name="a/b"), "'a/b'.*letters"),
        (lambda: RunConfig(storage_path=Path("s3://bucket")), "pathlib takes a slash"),
        (lambda: RunConfig(storage_path=""), "expected a path or an URL, or None"),
        (lambda: RunConfig(name=""), "''.*1 to 100"),
        (lambda: RunConfig(priority=1001), "priority=1001: expected an int, -1000 to 1000"),
        (lambda: RunConfig(priority=0.5), "priority=0.5"),  # type: ignore[arg-type]
        (lambda: RunConfig(worker_env={"A": 1}), r"worker_env\['A'\]=1"),  # type: ignore[dict-item]
        (lambda: TorchConfig(backend="mpi"), "'mpi'.*gloo or nccl"),
        (lambda: TorchConfig(timeout_s=0), "timeout_s=0"),
        (lambda: TorchConfig(timeout_s=float("nan")), "timeout_s=nan"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_both_backends_are_what_no_backend_is() -> None:
    assert TorchConfig(backend="cpu:gloo,cuda:nccl") == TorchConfig()


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        (FailureConfig, "hang_timeout_s", None, "hang_timeout_s=None: expected seconds"),
        (FailureConfig, "hang_timeout_s", "30", "hang_timeout_s='30': expected seconds"),
        (FailureConfig, "max_failures", True, "max_failures=True: expected an int"),
        (FailureConfig, "max_preemptions", 0.5, "max_preemptions=0.5: expected an int"),
        (FailureConfig, "recovery", ["auto"], r"recovery=\['auto'\]: expected one of"),
        (TorchConfig, "timeout_s", None, "timeout_s=None: expected seconds"),
        (TorchConfig, "timeout_s", datetime.timedelta(seconds=3), "timedelta.*expected seconds"),
        (ScalingConfig, "workers_per_replica", "2", "workers_per_replica='2'.*divides"),
        (ScalingConfig, "resources_per_worker", {"CPU": "2"}, "'2'}: expected a dict of numbers"),
        (ScalingConfig, "resources_per_worker", {"CPU": True}, "True}: expected a dict of num"),
        (ScalingConfig, "resources_per_worker", {2: 2}, "{2: 2}: expected a dict of numbers"),
        (ScalingConfig, "resources_per_worker", ["CPU"], r"\['CPU'\]: expected a dict of num"),
        (ScalingConfig, "label_selector", "a=1", "'a=1': expected a dict of str"),
        (ScalingConfig, "label_selector", {"a": 1}, "{'a': 1}: expected a dict of str"),
        (ScalingConfig, "accelerator_type", 5, "accelerator_type=5: expected a str"),
        (ScalingConfig, "use_gpu", "no", "use_gpu='no': expected True or False"),
        (CheckpointConfig, "async_save", "no", "async_save='no': expected True or False"),
        (CheckpointConfig, "num_to_keep", True, "num_to_keep=True: expected None"),
        (CheckpointConfig, "checkpoint_score_attribute", 3, "attribute=3: expected the name"),
        (DataConfig, "num_feeders", "2", "num_feeders='2': expected an int, or"),
        (DataConfig, "num_feeders", (3, 1), r"num_feeders=\(3, 1\): expected 1 <= min <= max"),
        (DataConfig, "feeder_resources", {"CPU": "2"}, "'2'}: expected a dict of numbers"),
        (RunConfig, "failure_config", {"max_failures": 3}, "3}: expected a FailureConfig"),
        (RunConfig, "checkpoint_config", FailureConfig(), "expected a CheckpointConfig"),
        (RunConfig, "name", 3, "name=3: expected a str"),
        (RunConfig, "storage_path", 3, "storage_path=3: expected a str"),
        (RunConfig, "preemptible", "no", "preemptible='no': expected True or False"),
        (RunConfig, "worker_env", ["A=1"], r"\['A=1'\]: expected a dict of environment"),
        (RunConfig, "worker_env", {"A=B": "1"}, r"worker_env\['A=B'\]='1': .* no '='"),
        (RunConfig, "worker_env", {"": "1"}, r"worker_env\[''\]='1': .*at least one char"),
        (RunConfig, "worker_env", {"A": "1\0"}, r"worker_env\['A'\].* NUL"),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_written(
    kind: Any, field: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__}: .*{says}"):
        kind(**{field: value})


def test_numbers_of_numpy_are_taken_as_plain_ones() -> None:
    two, half = numpy.int64(2), numpy.float32(0.5)
    scaling = ScalingConfig(
        num_workers=(two, two),  # type: ignore[arg-type]
        use_gpu=True,
        workers_per_replica=two,  # type: ignore[arg-type]
        resources_per_worker={"CPU": two, "GPU": half},  # type: ignore[dict-item]
    )
    assert scaling.resources().as_dict() == {"CPU": 2.0, "GPU": 0.5}
    failures = FailureConfig(max_failures=two, hang_timeout_s=half)  # type: ignore[arg-type]
    times = TorchConfig(timeout_s=two).timeout_s  # type: ignore[arg-type]
    plain = (*scaling.num_workers, failures.max_failures, failures.hang_timeout_s, times)  # type: ignore[misc]
    assert [(type(value), value) for value in plain] == [
        (int, 2), (int, 2), (int, 2), (float, 0.5), (int, 2),
    ]  # fmt: skip
    assert PeerReplication(every_n_steps=two).every_n_steps == 2  # type: ignore[arg-type]


def test_none_stands_for_the_default_of_a_nested_configuration() -> None:
    config = RunConfig(failure_config=None, checkpoint_config=None, callbacks=None)  # type: ignore[arg-type]
    assert config == RunConfig()


# ------------------------------------------------------------------------------------ callbacks


class Reports:
    """Told of reports only; how its argument is called is its own business."""

    def after_report(self, what: dict[str, Any]) -> None:
        """Take it."""


class Events:
    """Told of events only, and has the other method switched off."""

    after_report = None

    def after_event(self, name: str, fields: dict[str, str], *more: Any) -> None:
        """Take it."""


class RayStyle:
    """As a callback of Ray's is."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        """Take what nobody gives here."""


class EventsOfOneArgument:
    """Takes too little."""

    def after_event(self, event: Any) -> None:
        """Take one thing where there are two."""


class NotCallable:
    """Has the name for something else."""

    after_report = "yes"


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([print], r"callbacks\[0\]=<built-in function print>: expected .*after_report\(metrics\)"),
        (print, "callbacks=<built-in function print>: expected a list"),
        (Reports(), "callbacks=.*Reports.*: expected a list"),
        ([Reports(), RayStyle()], r"callbacks\[1\]=.*RayStyle.*after_report\(metrics\)"),
        ([Reports], r"callbacks\[0\]=<class .*Reports"),
        ([EventsOfOneArgument()], r"callbacks.*EventsOfOne.*after_event\(name, fields\)"),
        ([NotCallable()], r"callbacks\[0\]=.*NotCallable"),
    ],
)
def test_a_callback_that_cannot_be_told_is_refused(callbacks: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^RunConfig: {says}"):
        RunConfig(callbacks=callbacks)


def test_callbacks_are_kept_in_their_order() -> None:
    reports, events = Reports(), Events()
    assert RunConfig(callbacks=[reports, events]).callbacks == (reports, events)
    assert RunConfig(callbacks=(events,)).callbacks == (events,)


def test_a_range_of_workers_is_elastic_and_a_number_is_not() -> None:
    assert ScalingConfig(num_workers=(2, 8)).elasticity_enabled
    fixed = ScalingConfig(num_workers=3)
    assert (fixed.min_workers, fixed.max_workers, fixed.elasticity_enabled) == (3, 3, False)
    assert ScalingConfig(use_gpu=True).resources().as_dict() == {"GPU": 1.0}
    both = ScalingConfig(num_workers=(2, 4), use_gpu=True, resources_per_worker={"CPU": 8})
    assert both.total_resources == {"CPU": 32.0, "GPU": 4.0}
    assert ScalingConfig(num_workers=2).total_resources == {"CPU": 2.0}
    assert ScalingConfig(num_workers=2, use_gpu=True).total_resources == {"GPU": 2.0}
    assert ScalingConfig(num_workers=0).max_workers == 0


# ---------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_a_directory_that_can_be_copied_or_used_in_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("x")
    checkpoint = Checkpoint.from_directory(source)
    with checkpoint.as_directory() as directory:
        assert directory == str(source)
    copy = Path(checkpoint.to_directory(tmp_path / "copy"))
    assert (copy / "deep" / "file").read_text() == "x"
    assert checkpoint.to_directory(source) == str(source)
    fresh = Path(checkpoint.to_directory())
    assert (fresh / "deep" / "file").read_text() == "x"
    assert checkpoint == Checkpoint(str(source))
    assert hash(checkpoint) == hash(Checkpoint(str(source)))
    assert checkpoint != Checkpoint(str(copy))


def test_a_checkpoint_in_other_storage_is_copied_and_the_copy_deleted() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/run/c1/a": b"1", "/run/c1/sub/b": b"2"})
    checkpoint = Checkpoint("memory://run/c1")
    assert not checkpoint.is_local
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "a").read_bytes() == b"1"
        assert (Path(directory) / "sub" / "b").read_bytes() == b"2"
    assert not Path(directory).exists()
    assert checkpoint != Checkpoint("/run/c1")


def test_a_checkpoint_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(UsageError, match=f"{gone}.*no such directory"):
        Checkpoint.from_directory(gone)
    with pytest.raises(StorageError, match=str(gone)):
        Checkpoint(str(gone)).to_directory()
    with pytest.raises(StorageError, match=str(gone)), Checkpoint(str(gone)).as_directory():
        pass
    with pytest.raises(StorageError, match="/nothing"):
        Checkpoint("memory://nothing").to_directory()
    (tmp_path / "file").touch()
    (tmp_path / "source").mkdir()
    with pytest.raises(StorageError, match="file/x"):
        Checkpoint.from_directory(tmp_path / "source").to_directory(tmp_path / "file" / "x")


# -------------------------------------------------------------------------------------- results


def result(*scores: Any) -> Result:
    kept = [(Checkpoint(f"/c{i}"), {"score": s}) for i, s in enumerate(scores)]
    return Result(metrics=None, checkpoint=None, path="", best_checkpoints=kept)


@pytest.mark.parametrize(
    ("scores", "mode", "best"),
    [
        ((1, 3, 2), "max", "/c1"),
        ((1, 3, 2), "min", "/c0"),
        ((2, 2), "max", "/c0"),
        (("nan", 0.5, "inf"), "max", "/c1"),
        ((float("nan"), 1), "min", "/c1"),
        ((None, [1], -1), "max", "/c2"),
    ],
)
def test_the_best_checkpoint_has_the_best_number(scores: Any, mode: str, best: str) -> None:
    assert result(*scores).get_best_checkpoint("score", mode) == Checkpoint(best)


def test_without_a_number_there_is_no_best_checkpoint() -> None:
    assert result("nan").get_best_checkpoint("score") is None
    with pytest.raises(UsageError, match="no checkpoint has this metric; expected one of score"):
        result(1).get_best_checkpoint("loss")
    with pytest.raises(UsageError, match="mode='low'"):
        result(1).get_best_checkpoint("score", "low")


@pytest.mark.parametrize(
    ("run", "url", "options"),
    [
        (
            lambda: RunConfig(
                storage_path="b/runs",
                storage_filesystem=PyFileSystem(
                    FSSpecHandler(s3(key="k", endpoint_url="http://h"))
                ),
            ),
            "s3://b/runs",
            {"key": "k", "endpoint_url": "http://h"},
        ),
        (
            lambda: RunConfig(
                storage_path="c",
                storage_filesystem=S3FileSystem(
                    access_key="k", secret_key="s", endpoint_override="h:1", region="x"
                ),
            ),
            "s3://c",
            {
                "key": "k",
                "secret": "s",
                "endpoint_url": "https://h:1",
                "client_kwargs": {"region_name": "x"},
            },
        ),
        (
            lambda: RunConfig(storage_path="s3://d/e?endpoint_override=http://h:2&region=x"),
            "s3://d/e",
            {"endpoint_url": "http://h:2", "client_kwargs": {"region_name": "x"}},
        ),
        (
            lambda: RunConfig(storage_path="f/", storage_filesystem=s3(anon=True)),
            "s3://f",
            {"anon": True},
        ),
    ],
)
def test_what_a_file_system_was_made_with_goes_with_its_url(
    run: Callable[[], RunConfig], url: str, options: dict[str, Any]
) -> None:
    assert str(run().storage_path).rstrip("/") == url
    assert options_of(f"{url}/name/checkpoints") == options_of(url) == options
    assert options_of(f"{url}elsewhere") == {}
    assert json.loads(as_environment()[VARIABLE])[url] == options
    remember(url, {})
    assert url not in as_environment().get(VARIABLE, "")
    take({VARIABLE: json.dumps({url: options})})
    assert options_of(url) == options
    remember(url, {})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: s3(session=object()), "session=<object>.*expected text"),
        (lambda: s3(True), "without names.*s3fs.S3FileSystem"),
        (lambda: S3FileSystem(role_arn="arn"), "role_arn.*AWS_PROFILE"),
    ],
)
def test_a_file_system_that_workers_cannot_open_is_refused(
    make: Callable[[], Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig(storage_path="b", storage_filesystem=make())


def test_a_file_system_is_named_by_its_url(tmp_path: Path) -> None:
    memory, local = fsspec.filesystem("memory"), fsspec.filesystem("file")
    run = RunConfig(storage_path="/runs", storage_filesystem=memory)
    assert (run.storage_path, run.storage_filesystem) == ("memory:///runs", None)
    assert RunConfig(storage_path=tmp_path, storage_filesystem=local).storage_path == str(tmp_path)
    assert Checkpoint(tmp_path, local) == Checkpoint(tmp_path)
    assert repr(Checkpoint(tmp_path)) == f"Checkpoint(filesystem=local, path={tmp_path})"
    assert repr(Checkpoint("memory://a")) == "Checkpoint(filesystem=memory, path=/a)"
    below = DirFileSystem(path=str(tmp_path), fs=local)
    assert RunConfig(storage_path="b", storage_filesystem=below).storage_path == f"{tmp_path}/b"
    with pytest.raises(ConfigError, match="expected a path in storage_filesystem"):
        RunConfig(storage_filesystem=memory)
    with pytest.raises(ConfigError, match="expected a file system of fsspec or pyarrow"):
        Checkpoint(tmp_path, "s3")
