"""A script for torchrun under torchrun, and under `elastic run` with the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.client.terminal import EXIT_UNREACHABLE
from elastic.core.facts import JobPhase
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.scripts import Script
from tests.chaos.torchrun_script import KILLED_IN
from tests.patience import wait_for

SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
WORDS = ("--nproc_per_node=2", "--max-restarts=1", "--rdzv_id=one")


@pytest.fixture
def launched(scripts: list[Script], tmp_path: Path) -> Callable[..., Script]:
    """Start a launcher with a folder of its own."""

    def launch(name: str, *launcher: str, case: str = "train", script: Path = SCRIPT) -> Script:
        folder = tmp_path / name
        folder.mkdir()
        scripts.append(Script(case, folder, *launcher, script=script))
        return scripts[-1]

    return launch


def elastic_run(tmp_path: Path, *flags: str) -> tuple[str, ...]:
    return ("-m", "elastic.client.cli", "run", "--storage", str(tmp_path / "runs"), *flags)


def environments(script: Script) -> list[dict[str, str | None]]:
    """What the workers found, by line; which attempt it is aside."""
    found = [json.loads(x.partition(" ")[2]) for x in lines(script, "environment")]
    return [{k: v for k, v in one.items() if "RESTART_COUNT" not in k} for one in found]


def lines(script: Script, beginning: str) -> list[str]:
    """Return the lines that begin so; a warning of c10d's, written in pieces, may be before it."""
    said = script.out.read_text().splitlines()
    return sorted(x[x.index(beginning) :] for x in said if beginning in x)


def test_a_killed_worker_is_outlived_with_torchruns_environment_and_weights(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    # Torchrun's is the undisturbed run: on gloo it mostly waits for ever after a kill.
    torchrun = launched("torchrun", *TORCHRUN, *WORDS, case="undisturbed")
    assert torchrun.wait() == 0, torchrun.said()
    (one, other) = lines(torchrun, "trained")
    assert one == other
    run = launched("run", *elastic_run(tmp_path, *WORDS))
    assert run.wait() == 0, run.said()
    assert "killed by SIGKILL" in run.err.read_text(), run.said()
    found = environments(run)
    assert len(found) == 4, run.said()
    assert all(each in environments(torchrun) for each in found), found
    assert all(each in found for each in environments(torchrun)), found
    went_on = one.replace("epoch 0:", f"epoch {KILLED_IN}:")
    assert lines(run, "trained") == [went_on, went_on], run.said()
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_an_error_that_record_wrote_down_is_told_once_and_last(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    flags = ("--nproc-per-node=2", "--tee=3", f"--log-dir={tmp_path}")
    run = launched("run", *elastic_run(tmp_path, *flags), case="raise")
    assert run.wait() == 1, run.said()
    err = run.err.read_text()
    assert "first failure in worker" in err
    assert err.endswith("ValueError: bad batch at step 7\n")
    assert err.count("\nValueError: bad batch at step 7\n") == 1, run.said()
    run.assert_nothing_is_left()
    shown = (tmp_path / "run" / "stdout").read_text()
    assert "[default1]:environment" in shown
    (written,) = tmp_path.glob("elastic_*/attempt_0/0/output.log")
    assert "environment" in written.read_text()


@pytest.mark.slow
def test_scripts_that_end_their_process_with_success_have_finished(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    run = launched("leave", *elastic_run(tmp_path, "--nproc-per-node=2"), case="leave")
    assert run.wait() == 0, run.said()
    assert len(environments(run)) == 2, run.said()
    run.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deadlock", "backward", "subgroup"])
def test_ranks_that_wait_for_each_other_run_their_script_again(
    launched: Callable[..., Script], tmp_path: Path, case: str
) -> None:
    flags = ("--nproc-per-node=2", "--hang-timeout=3")
    run = launched("waits", *elastic_run(tmp_path, *flags), case=case)
    assert run.wait() == 0, run.said()
    assert "all members have waited for each other" in run.err.read_text(), run.said()
    assert len(lines(run, "trained")) == 2, run.said()
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_hangs_is_outlived_after_the_scripts_own_timeout(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    run = launched("hang", *elastic_run(tmp_path, "--nproc-per-node=2"), case="hang")
    assert run.wait() == 0, run.said()
    assert len(lines(run, "trained")) == 2, run.said()
    run.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["agent", pytest.param("coordinator", marks=pytest.mark.slow)])
def test_a_part_of_its_own_cluster_that_dies_ends_the_command_with_its_log(
    launched: Callable[..., Script], tmp_path: Path, part: str
) -> None:
    run = launched("alone", *elastic_run(tmp_path, "--nproc-per-node=2"), case="wait")
    wait_for(lambda: len(environments(run)) == 2, "two workers")
    module = {"agent": "elastic.agent.cli", "coordinator": "elastic.coord.cli"}[part]
    (found,) = [one for one in run.processes() if module in one.cmdline()]
    found.kill()
    assert run.wait() == EXIT_UNREACHABLE, run.said()
    err = run.err.read_text()
    assert f"the embedded {part} (pid {found.pid}) was killed by SIGKILL" in err
    assert "its log ends:\n" in err
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_nodes_that_a_cluster_loses_are_outlived_within_nnodes(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    with LocalCluster(nodes=3, workers_per_node=2, directory=tmp_path / "cluster") as cluster:
        where = (f"--coord={cluster.address}", "--nnodes=1:3", "--nproc-per-node=2")
        run = launched("nodes", *elastic_run(tmp_path, *where), case="wait")
        wait_for(lambda: sizes(run) == ["6"] * 6, "six workers")
        cluster.kill_node("n3")
        wait_for(lambda: sizes(run) == ["4"] * 4 + ["6"] * 6, "the other four")
        (tmp_path / "nodes" / "storage" / "end").touch()
        assert run.wait() == 0, run.said()
    assert {one["LOCAL_WORLD_SIZE"] for one in environments(run)} == {"2"}
    assert {one["GROUP_RANK"] for one in environments(run)} == {"0", "1", "2"}
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_a_command_that_cannot_write_what_it_hears_ends_its_job_too(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    with LocalCluster(nodes=1, workers_per_node=1, directory=tmp_path / "cluster") as cluster:
        words = (f"--coord={cluster.address}", "--tee=3", f"--log-dir={tmp_path / 'blocked'}")
        run = launched("blocked", *elastic_run(tmp_path, *words), case="block")
        assert run.wait() != 0, run.said()
        assert "give --log-dir a directory with room" in run.err.read_text(), run.said()
        (job,) = cluster.client.status().view.jobs
        assert job.record.phase is JobPhase.STOPPED, run.said()


def sizes(run: Script) -> list[str]:
    """The size of the group as every worker found it, sorted."""
    return sorted(str(one["WORLD_SIZE"]) for one in environments(run))


@pytest.mark.slow
def test_a_program_that_is_not_python_runs_on_every_rank(
    launched: Callable[..., Script], tmp_path: Path
) -> None:
    flags = ("--no-python", "--nproc-per-node=2", "sh", "-c", 'echo "rank $RANK: $1"; exit $RANK')
    run = launched("sh", *elastic_run(tmp_path, *flags), case="0", script=Path("sh"))
    assert run.wait() == 1, run.said()
    assert lines(run, "rank") == ["rank 0: 0", "rank 1: 0"]
    assert run.err.read_text().endswith("exited with code 1\n"), run.said()
    run.assert_nothing_is_left()
