"""Checkpoints on S3: over the real protocol, with the faults that S3 has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.errors import StorageError
from elastic.storage.files import Files
from elastic.storage.marker import MARKER, PREPARED, CheckpointMarker
from elastic.storage.metrics import MetricsLog, read_metrics
from elastic.storage.run_directory import RunDirectory
from elastic.storage.study_log import StudyLog
from elastic.train.result import read_history
from tests.integration.s3_server import BUCKET, Trouble, s3
from tests.patience import DEADLINE_S

__all__ = ["s3"]

URL = f"s3://{BUCKET}/results/run"


def marker(generation: int = 2, unix_ns: int = 1, index: int = 3) -> CheckpointMarker:
    return CheckpointMarker("j1", generation, index, 4, unix_ns, "{}", ())


def names(path: str = "*") -> list[str]:
    return Files(URL).list(path)


def test_a_run_lives_in_a_bucket(s3: Trouble, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "model").write_bytes(b"x" * 3_000_000)
    (tmp_path / "deep" / "shard").write_bytes(b"")
    run = RunDirectory(URL)
    assert run.newest_checkpoint() == ""
    files = run.upload(tmp_path, "c1", claim=lambda _: True)
    assert [file[:2] for file in files] == [("deep/shard", 0), ("model", 3_000_000)]
    assert not run.is_committed("c1")
    run.prepare("c1", marker())
    assert run.finish("c1")
    assert not run.checkpoint("c1").exists(PREPARED)
    run.commit("c2", marker(unix_ns=2, index=4))
    assert run.newest_checkpoint() == f"{URL}/checkpoints/c2"
    assert [run.checkpoint("c1").checksum(file.path) for file in files] == list(files)
    run.remove("c1")
    assert [name for name, _ in run.markers()] == ["c2"]
    run.prepare("c3", marker())
    for name in ("c2", "c3"):
        run.discard(name)
    assert run.names() == ["c2"]


def test_a_studys_log_has_one_writer(s3: Trouble) -> None:
    path = f"s3://{BUCKET}/studies/one"
    first = StudyLog(path)
    first.add({"e": "study", "settings": {"name": "one"}})
    second = StudyLog(path)
    first.add({"e": "proposed", "trial": 0, "name": "one_00000", "config": {"lr": 1}})
    with pytest.raises(StorageError, match="was written by another driver"):
        second.add({"e": "proposed", "trial": 0, "name": "one_00000", "config": {"lr": 2}})
    assert [trial.config for trial in StudyLog(path).study.trials] == [{"lr": 1}]


def test_a_large_object_that_breaks_off_does_not_exist(s3: Trouble) -> None:
    files = Files(URL)

    def write_some() -> None:
        with files.writing("model") as output:
            for _ in range(15):
                output.write(bytes(4 << 20))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_some()
    assert names() == []
    # Nor is it kept, and paid for, as the parts of an upload that nobody completes.
    uploads = files.fs.call_s3("list_multipart_uploads", Bucket=BUCKET)
    assert not uploads.get("Uploads")


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown")])
def test_a_store_that_is_busy_is_asked_again(s3: Trouble, status: int, code: str) -> None:
    # More often than s3fs does it by itself, which knows one of the three.
    times = 6 if code == "SlowDown" else 2
    for _ in range(times):
        s3.plan("PUT", status, code)
    files = Files(URL)
    files.write("model", b"weights")
    for _ in range(times):
        s3.plan("GET", status, code)
    assert files.read("model") == b"weights"


def test_a_store_that_stays_busy_is_given_up(s3: Trouble) -> None:
    for _ in range(50):
        s3.plan("PUT", 503, "SlowDown")
    with pytest.raises(StorageError, match=rf"cannot write {URL}/model: .*SlowDown"):
        Files(URL, patience_s=0).write("model", b"weights")


def test_a_bucket_that_is_missing_is_not_made(s3: Trouble) -> None:
    with pytest.raises(StorageError, match="bucket"):
        Files("s3://nobody-made-it/run").write("model", b"x")
    assert len([one for one in s3.requests if one[0] == "PUT"]) == 1


def test_rights_that_are_missing_are_told_at_once(s3: Trouble) -> None:
    s3.plan("PUT", 403, "AccessDenied")
    with pytest.raises(StorageError, match="as planned: AccessDenied"):
        Files(URL).write("model", b"x")


def test_a_server_that_is_not_there_is_waited_for_and_then_named(
    s3: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    files = Files(URL, patience_s=0.1)
    files.fs.clear_instance_cache()
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        Files(URL, patience_s=0.1).read("model")


# ------------------------------------------------------------------------------------ credentials


def test_renewed_credentials_are_read_without_a_restart(
    s3: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(URL)
    run.files.write("first", b"x")
    s3.refuse_key("first-key")
    with pytest.raises(StorageError, match=r"ExpiredToken.*credentials.*renew them"):
        run.files.write("second", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
    run.files.write("second", b"x")
    assert run.files.list("*") == ["first", "second"]
    run.commit("c1", marker())


def test_credentials_that_were_renewed_in_time_are_never_missed(
    s3: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(URL)
    files.write("first", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
    s3.refuse_key("first-key")
    assert files.exists("first")
    assert files.read("first") == b"x"


# --------------------------------------------------------------------------------- one who commits


def test_of_many_that_create_an_object_one_succeeds(s3: Trouble) -> None:
    ready = threading.Barrier(4)

    def create(number: int) -> bool:
        files = Files(URL)
        ready.wait(DEADLINE_S)
        return files.create("marker", str(number).encode())

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(create, range(4)))
    assert won.count(True) == 1
    assert Files(URL).read("marker") == str(won.index(True)).encode()


def test_a_commit_whose_answer_is_lost_is_ours_all_the_same(s3: Trouble) -> None:
    s3.plan("PUT", 500, "InternalError", after=True)
    run = RunDirectory(URL)
    run.commit("c1", marker())
    assert run.markers() == [("c1", marker())]
    assert len([one for one in s3.requests if one[0] == "PUT"]) > 1
    with pytest.raises(StorageError, match="generation 2 of job j1 has committed"):
        run.commit("c1", marker(generation=3))


def test_a_store_without_conditional_writes_is_looked_at_first(s3: Trouble) -> None:
    s3.plan("PUT", 501, "NotImplemented")
    files = Files(URL)
    assert files.create(MARKER, b"first")
    s3.plan("PUT", 501, "NotImplemented")
    assert not files.create(MARKER, b"second")
    assert files.read(MARKER) == b"first"


def test_a_store_may_refuse_a_taken_name_without_saying_why(s3: Trouble) -> None:
    files = Files(URL, patience_s=0)
    s3.plan("PUT", 412, "PreconditionFailed")
    assert not files.create(MARKER, b"second")


# ---------------------------------------------------------------------------------------- metrics


def row(index: int, generation: int = 1) -> dict[str, object]:
    unix_ns = generation * 10**9 + index
    return {"generation": generation, "index": index, "unix_ns": unix_ns, "metrics": {"i": index}}


def test_metrics_cost_no_more_the_longer_a_run_lasts(s3: Trouble) -> None:
    run = RunDirectory(URL)
    for index in range(200):
        run.metrics.add(0, row(index))
    # The first at once, the others together: reports come faster than they are written.
    assert len([one for one in s3.requests if one[0] == "PUT"]) < 20
    run.metrics.flush()
    assert [one["index"] for one in read_history(URL)] == list(range(200))
    assert run.read_metrics(1) == []


def test_every_generation_and_every_writer_has_a_part_of_its_own(s3: Trouble) -> None:
    first, second = RunDirectory(URL), RunDirectory(URL)
    first.metrics.add(0, row(0))
    first.metrics.add(0, row(1))
    second.metrics.add(0, row(0, generation=2))
    first.metrics.add(0, row(0, generation=3))
    # What a process of an old generation writes late is where it belongs.
    first.metrics.flush()
    second.metrics.flush()
    read = [(one["generation"], one["index"]) for one in read_history(URL)]
    assert read == [(1, 0), (1, 1), (2, 0), (3, 0)]


def test_lines_that_could_not_be_written_are_written_with_the_next_ones(s3: Trouble) -> None:
    files = Files(URL, patience_s=0)
    log = MetricsLog(files, 0, flush_s=0)
    s3.plan("PUT", 403, "AccessDenied")
    with pytest.raises(StorageError, match="AccessDenied"):
        log.append(row(0))
    log.append(row(1))  # Storage that has just failed is not asked with every report.
    log.flush()
    assert [one["index"] for one in read_metrics(files, 0)] == [0, 1]
