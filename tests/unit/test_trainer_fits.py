"""TorchTrainer on a cluster of the script's own: what the machine lacks is known at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import elastic.client.jobs
import elastic.train.cluster
from elastic import data, train
from elastic.client.embedded import ClusterConnection
from elastic.core.facts import JobId, Node, NodeId, Resources
from elastic.errors import Refused, UsageError
from elastic.train.torch import TorchTrainer


class Submitted(Exception):
    """The job went to the coordinator."""


class FakeClient:
    """A coordinator that knows one small node, or none."""

    nodes: tuple[Node, ...] = (Node(NodeId("local"), 1, "127.0.0.1", 4, Resources.of({"CPU": 4})),)

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> Any:
        nodes = [SimpleNamespace(node=node) for node in self.nodes]
        return SimpleNamespace(view=SimpleNamespace(nodes=nodes))

    def submit(self, spec: object) -> None:
        raise Submitted

    def record_of(self, job_id: str) -> None:
        """Know no job."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ClusterConnection:
    """Stand for the script's own cluster, of one node."""
    cluster = ClusterConnection("nowhere:1", processes=[object()])  # type: ignore[list-item]
    monkeypatch.setattr(elastic.train.cluster, "require_cluster", lambda *_: cluster)
    monkeypatch.setattr(elastic.client.jobs, "Client", FakeClient)
    return cluster


def fit(storage: Path, **scaling: Any) -> None:
    TorchTrainer(
        lambda: None,
        scaling_config=train.ScalingConfig(**scaling),
        run_config=train.RunConfig(name="r", storage_path=storage),
    ).fit()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"use_gpu": True}, "each worker needs GPU=1, the largest node has 0"),
        ({"resources_per_worker": {"CPU": 64}}, "each worker needs CPU=64, the largest node has 4"),
        ({"label_selector": {"zone": "a"}}, "no connected node carries the labels zone=a"),
        ({"accelerator_type": "H100"}, "no connected node has accelerator H100"),
        (
            {"num_workers": 2, "placement_strategy": "STRICT_SPREAD"},
            "what lacks: nodes (each takes one worker)",
        ),
    ],
)
def test_what_this_machine_lacks_is_refused_before_anything_is_made(
    tmp_path: Path, scaling: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=r"^run r: this script's own cluster") as caught:
        fit(tmp_path, **scaling)
    assert says in str(caught.value)
    assert "elastic.init(address), or ELASTIC_COORD" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cluster")
def test_what_fits_is_submitted(tmp_path: Path) -> None:
    with pytest.raises(Submitted):
        fit(tmp_path, num_workers=(2, 8), resources_per_worker={"CPU": 2})


def test_a_cluster_that_can_grow_is_not_judged(tmp_path: Path, cluster: ClusterConnection) -> None:
    cluster.processes.clear()
    with pytest.raises(Submitted):
        fit(tmp_path, use_gpu=True)


def test_a_run_whose_feeders_are_not_taken_trains_without(
    cluster: ClusterConnection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken: list[Any] = []

    def submit(_: FakeClient, spec: Any) -> None:
        if spec.feeds:
            raise Refused("too many jobs")
        taken.append(spec)

    monkeypatch.setattr(FakeClient, "submit", submit)
    trainer = TorchTrainer(
        lambda: None,
        datasets={"train": data.range(4)},
        dataset_config=train.DataConfig(num_feeders=1, feeder_resources={"CPU": 1}),
        run_config=train.RunConfig(name="r", storage_path=tmp_path),
    )
    spec = dataclasses.replace(trainer.job_spec(), job_id=JobId("j"))
    assert trainer.submit(spec, cast("Any", FakeClient()), cluster) == taken[0]
    assert "run r trains without feeders: too many jobs" in capsys.readouterr().err
