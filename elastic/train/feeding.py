"""The job of a run's feeders: workers that compute batches for the workers of another job.

They are placed by the coordinator like all others, with resources of their own and a priority below
that of the run, and end with it (`JobSpec.feeds`). Each serves from its start on, whatever becomes
of the others: their group exists only to have one of them write down the addresses of all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.config import PRIORITY_MAX, JobSpec
from elastic.core.facts import EntryKind, JobId, Resources, Strategy
from elastic.errors import StorageError, StorageNotShared
from elastic.storage.files import Files
from elastic.train.config import DataConfig
from elastic.train.session import require_engine

NAME_CHARS = 80


@dataclass(frozen=True)
class FeederSecret:
    """What both jobs of a run are given, so that they trust each other.

    Attributes:
        key: drawn for this attempt of the run.
    """

    key: str = field(repr=False)


def feeders_of(spec: JobSpec, job_id: JobId, config: DataConfig, secret: FeederSecret) -> JobSpec:
    """Return the job of the feeders of another job.

    Args:
        spec: the job that is fed.
        job_id: of the feeders' job.
        config: their number, and the resources of each.
        secret: known to both jobs.

    Raises:
        ConfigError: the resources are not valid.
    """
    from elastic.worker.process.entry import pack

    place = {"run_path": spec.run_path, "job_id": spec.job_id, "secret": secret}
    low, high = config.feeder_bounds
    entry = replace(
        spec.entry,
        kind=EntryKind.FUNCTION,
        target=f"feeders of {spec.name}",
        payload=pack(feed, place, {}).payload,
        imports=(),
    )
    return JobSpec(
        job_id=job_id,
        name=f"{spec.name[:NAME_CHARS]}-feeders-{job_id}",
        entry=entry,
        min_workers=low,
        max_workers=high,
        resources_per_worker=Resources.of(config.feeder_resources or {}),
        strategy=Strategy.PACK,
        backend="gloo",
        hang_timeout_s=0.0,
        max_failures=-1,
        priority=max(-PRIORITY_MAX, spec.priority - 1),
        feeds=spec.job_id,
    )


def feed(config: Mapping[str, Any]) -> None:
    """Compute batches until the job ends; the function of its workers."""
    import torch

    from elastic.data.feeder_network import FOLDER, FeederServer, addresses_file
    from elastic.worker.engine.bystander import stay
    from elastic.worker.engine.train_call import current

    context, engine = current(), require_engine("feeders")
    files = Files(config["run_path"])
    if context is None or not files.exists("run.json"):
        raise StorageNotShared(
            f"the run directory {config['run_path']} is not on this node: feeders need it to say "
            f"where they are; use a storage path that all nodes share"
        )
    name = addresses_file(config["job_id"])
    # By attempts that are over.
    left = [one for one in files.list(f"{FOLDER}/*.json") if one != name]
    torch.set_num_threads(1)
    reach = context.reach
    server = FeederServer(reach.host, config["secret"].key, reach.ports)

    at_once = Files(config["run_path"], patience_s=0.0)  # It may be asked to leave meanwhile.

    def write(addresses: tuple[bytes, ...]) -> None:
        at_once.write(name, json.dumps([one.decode() for one in addresses]).encode())
        while left:
            with contextlib.suppress(StorageError):  # Gone, or the next attempt deletes it.
                at_once.delete(left.pop())

    stay(engine, server.address.encode(), write)


def feeders_factory(config: DataConfig, secret: FeederSecret | None) -> Callable[[], Any] | None:
    """Return what makes a source of feeders for a dataset of this worker, None for none.

    Without a secret there is no feeders' job: they run beside this worker.
    """
    from elastic.data.feeders import beside
    from elastic.worker.engine.train_call import current

    low, high = config.feeder_bounds
    context = current()
    if secret is None or context is None:
        return beside(low, high)
    run_path, job_id = context.run_path, context.job_id

    def make() -> Any:
        from elastic.data.feeder_network import FeedersOnNodes

        return FeedersOnNodes(run_path, job_id, secret.key, highest=high)

    return make
