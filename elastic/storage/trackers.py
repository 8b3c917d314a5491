"""Trackers: export the metrics of a run to other tools, each report exactly once.

    tensorboard[:DIR]      event file; default RUN/tensorboard
    json[:FILE]            one JSON object a line; default RUN/tracked.jsonl
    wandb:PROJECT          Weights & Biases; needs the package wandb
    mlflow:URI             an MLflow server or folder; needs the package mlflow

For files progress is recorded in RUN/trackers/NAME.json. A file is truncated to the recorded length
before it is appended to, so that data which was written but not recorded is not written twice. A
server finds the run by a fixed id, and is asked what it has: its package may still have held, and
lost, what it was given. Offline, W&B makes a folder for each process, and the last has everything.

Rule: a report is identified by its number in the run, as in elastic.tune: one that is repeated
after a loss has the same number, and is not exported twice.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.errors import ConfigError
from elastic.storage.event_file import first_record, scalars
from elastic.storage.files import Files
from elastic.storage.metrics import MetricsReader, Numbering

log = logging.getLogger(__name__)

FOLDER = "trackers"
KINDS = ("tensorboard", "json", "wandb", "mlflow")
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class Point:
    """One report.

    Attributes:
        number: of the report in the run, from 1.
        unix_s: when it was made.
        metrics: as parsed from JSON.
    """

    number: int
    unix_s: float
    metrics: Mapping[str, Any]

    def numbers(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in self.metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }


Encode = Callable[[Sequence[Point], bool], bytes]
"""Returns points as bytes of a file; whether they are the first ones there."""


class Tracker(Protocol):
    """Interface of a tracker: exports points.

    Attributes:
        known: number of the last report that it had when it was opened, 0 for none.
    """

    known: int

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Export these, oldest first; return the state to record once they are durable there.

        {} for a tracker that keeps its progress itself.
        """
        ...

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Note that this state was recorded: its points will not be exported again."""
        ...

    def close(self) -> None:
        """Release the tracker; the run may continue."""
        ...


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker that a user chose, such as "tensorboard:/boards".

    Attributes:
        kind: one of `KINDS`.
        target: the text after the colon, "" for the default.
    """

    kind: str
    target: str = ""

    @property
    def name(self) -> str:
        """Return the name of its state file: the kind, and a digest of the target."""
        digest = hashlib.sha256(self.target.encode()).hexdigest()[:8]
        return f"{self.kind}-{digest}" if self.target else self.kind


def parse_trackers(text: str) -> tuple[TrackerSpec, ...]:
    """Parse "tensorboard,json:/x.jsonl"; () for "".

    Raises:
        ConfigError: there is no such tracker, or its target is missing.
    """
    requests = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, target = part.partition(":")
        if kind not in KINDS:
            raise ConfigError(f"tracker {part!r}: expected one of {', '.join(KINDS)}")
        if kind in PACKAGES and not target:
            what = "the name of a project" if kind == "wandb" else "the address of its server"
            raise ConfigError(f"tracker {kind}: expected {kind}:NAME with {what}")
        requests.append(TrackerSpec(kind, target))
    return tuple(requests)


class Tracking:
    """Exports the new points of a run to one tracker, at each call of `turn`."""

    def __init__(self, run: str, spec: TrackerSpec) -> None:
        """Read the recorded progress; nothing is exported yet.

        Raises:
            ConfigError: a package is missing, or the target cannot be appended to.
        """
        self._files, self._request = Files(run), spec
        self._reader, self._numbering = MetricsReader(self._files, 0), Numbering()
        self._waiting: dict[int, Point] = {}
        self._tracker = _open(spec, self._files, self._remembered())
        self._shown = self._tracker.known

    def turn(self) -> int:
        """Export new points; returns their number.

        Raises:
            Exception: any error of the tracker or storage; the next call exports the same again.
        """
        for row in self._reader.read():
            number = self._numbering.take(row)
            if number > self._shown and number not in self._waiting:
                self._waiting[number] = Point(number, row.get("unix_ns", 0) / 1e9, row["metrics"])
        if not self._waiting:
            return 0
        state = self._tracker.show(list(self._waiting.values()))
        shown = max(self._waiting)
        if state:
            record = json.dumps({**state, "shown": shown})
            self._files.write(f"{FOLDER}/{self._request.name}.json", record.encode())
        self._tracker.taken_down(state)
        count, self._waiting, self._shown = len(self._waiting), {}, shown
        return count

    def close(self) -> None:
        self._tracker.close()

    def _remembered(self) -> dict[str, Any]:
        try:
            path = f"{FOLDER}/{self._request.name}.json"
            state = json.loads(self._files.read_if_there(path) or b"{}")
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}


def _open(spec: TrackerSpec, run: Files, state: Mapping[str, Any]) -> Tracker:
    if spec.kind in ("tensorboard", "json"):
        default = "tensorboard" if spec.kind == "tensorboard" else "tracked.jsonl"
        if not spec.target and not run.is_local:
            raise ConfigError(
                f"tracker {spec.kind}: {run.path} cannot be appended to; name a place on a disk: "
                f"{spec.kind}:PATH"
            )
        path = Path(spec.target or f"{run.root}/{default}").expanduser()
        if spec.kind == "tensorboard":
            return AppendedFile(path / "events.out.tfevents.1.elastic", state, _event_records)
        return AppendedFile(path, state, _json_lines)
    try:
        package = importlib.import_module(PACKAGES[spec.kind])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker {spec.kind}: the package {error.name} is not installed: pip install "
            f"{PACKAGES[spec.kind]}"
        ) from error
    run_id = hashlib.sha256(run.path.encode()).hexdigest()[:16]
    name = run.path.rstrip("/").rpartition("/")[2]
    make = Wandb if spec.kind == "wandb" else Mlflow
    return make(package, spec.target, run_id, name)


class AppendedFile:
    """A file that is truncated to its recorded length, and appended to."""

    def __init__(self, path: Path, state: Mapping[str, Any], encode: Encode) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 (kept open)
        self._kept = int(state.get("bytes", 0))
        self._encode = encode
        self.known = int(state.get("shown", 0))

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Append after the recorded length; returns the new length once it is durable."""
        size = os.fstat(self._file.fileno()).st_size
        if size > self._kept:
            self._file.truncate(self._kept)
        self._file.write(self._encode(points, not self._kept))
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Set the recorded length."""
        self._kept = int(state["bytes"])

    def close(self) -> None:
        self._file.close()


def _json_lines(points: Sequence[Point], _: bool) -> bytes:
    lines = (
        json.dumps({"step": p.number, "unix_s": round(p.unix_s, 3), **p.metrics}) + "\n"
        for p in points
    )
    return "".join(lines).encode()


def _event_records(points: Sequence[Point], is_new: bool) -> bytes:
    """Return the records of TensorBoard's event file."""
    records = [first_record(points[0].unix_s)] if is_new else []
    return b"".join([*records, *(scalars(p.unix_s, p.number, p.numbers()) for p in points)])


class Wandb:
    """One run of Weights & Biases, with a fixed id."""

    def __init__(self, wandb: Any, project: str, run_id: str, name: str) -> None:
        self._run = wandb.init(project=project, id=run_id, name=name, resume="allow")
        self.known = max(0, int(self._run.starting_step) - 1)

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Log each point under its number; without `commit` it would be held until the next."""
        for point in points:
            row = {**point.metrics, "report_unix_s": point.unix_s}
            self._run.log(row, step=point.number, commit=True)
        return {}

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the server keeps the progress."""

    def close(self) -> None:
        """Upload pending data."""
        self._run.finish()


class Mlflow:
    """One run of MLflow, found again by a tag."""

    TAG = "elastic.run"

    def __init__(self, mlflow: Any, uri: str, run_id: str, name: str) -> None:
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.search_runs(["0"], f"tags.`{self.TAG}` = '{run_id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
        else:
            made = self._client.create_run("0", tags={self.TAG: run_id}, run_name=name)
            self._id = made.info.run_id
        newest = self._client.get_run(self._id).data.metrics
        self.known = int(newest.get("report", 0))

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Log each point; the metric "report" is written last, and marks the point as complete."""
        for point in points:
            if point.number <= self.known:
                continue  # It has this one since a call that failed later.
            at_ms = round(point.unix_s * 1e3)
            values = {**point.numbers(), "report": float(point.number)}
            metrics = [
                self._entities.Metric(name, value, at_ms, point.number)
                for name, value in values.items()
                if math.isfinite(value)
            ]
            self._client.log_batch(self._id, metrics=metrics)
            self.known = point.number
        return {}

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the server keeps the progress."""

    def close(self) -> None:
        """Do nothing: nothing is pending."""
