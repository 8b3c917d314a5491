"""Trackers: where the metrics of a run are shown by others, each report exactly once.

    tensorboard[:DIR]      event file; default RUN/tensorboard
    json[:FILE]            one JSON object a line; default RUN/tracked.jsonl
    wandb:PROJECT          Weights & Biases; needs the package wandb
    mlflow:URI             an MLflow server or folder; needs the package mlflow

What was shown stands in RUN/trackers/NAME.json. Files are cut to what stands there before they are
written to again, so that what was written and not taken down is written once all the same; servers
are asked for the run by an id that never changes, and told of steps that they may know already.

Rule: a report counts by its number in the run, as in elastic.tune: one that is made again after a
loss has its number again, and is not told twice.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.errors import ConfigError, StorageError
from elastic.storage.event_file import first_record, scalars
from elastic.storage.files import Files
from elastic.storage.metrics import MetricsReader, Numbering

log = logging.getLogger(__name__)

FOLDER = "trackers"
KINDS = ("tensorboard", "json", "wandb", "mlflow")
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class Point:
    """What one report says.

    Attributes:
        number: of the report in the run, from 1.
        unix_s: when it was made.
        metrics: as JSON says them.
    """

    number: int
    unix_s: float
    metrics: Mapping[str, Any]

    def numbers(self) -> dict[str, float]:
        """Return those that are numbers."""
        return {
            name: float(value)
            for name, value in self.metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }


class Tracker(Protocol):
    """Shows points somewhere."""

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Show these, oldest first; returns what is to be remembered once they are safe there."""
        ...

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """What was shown, and what is to be remembered of it, will not be told again."""
        ...

    def close(self) -> None:
        """Let go of it; the run may go on."""
        ...


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker that a user chose, such as "tensorboard:/boards".

    Attributes:
        kind: one of `KINDS`.
        target: what stands after the colon, "" for the default.
    """

    kind: str
    target: str = ""

    @property
    def name(self) -> str:
        """Return what it is remembered under: a kind and a digest of where to."""
        digest = hashlib.sha256(self.target.encode()).hexdigest()[:8]
        return f"{self.kind}-{digest}" if self.target else self.kind


def parse_trackers(text: str) -> tuple[TrackerSpec, ...]:
    """Read "tensorboard,json:/x.jsonl"; () for "".

    Raises:
        ConfigError: there is no such tracker, or it lacks what it needs.
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
    """Brings one tracker up to date with a run, again and again."""

    def __init__(self, run: str, wish: TrackerSpec) -> None:
        """Read how far it is; nothing is shown yet.

        Args:
            run: path of the run directory.
            wish: which tracker.

        Raises:
            ConfigError: a package is missing, or files cannot be where they are wanted.
            StorageError: the run directory cannot be read.
        """
        self._files, self._request = Files(run), wish
        self._reader, self._numbering = MetricsReader(self._files, 0), Numbering()
        self._waiting: dict[int, Point] = {}
        self._state = self._remembered()
        self._tracker = _open(wish, self._files, self._state)

    def turn(self) -> int:
        """Show what is new; returns how many points that were.

        Raises:
            Exception: whatever the tracker or storage raise; the next turn shows the same again.
        """
        shown = int(self._state.get("shown", 0))
        for row in self._reader.read():
            number = self._numbering.take(row)
            if number > shown and number not in self._waiting:
                self._waiting[number] = Point(number, row.get("unix_ns", 0) / 1e9, row["metrics"])
        if not self._waiting:
            return 0
        told = self._tracker.show(list(self._waiting.values()))
        state = {**self._state, **told, "shown": max(self._waiting)}
        self._files.write(f"{FOLDER}/{self._request.name}.json", json.dumps(state).encode())
        self._tracker.taken_down(state)
        count, self._waiting, self._state = len(self._waiting), {}, state
        return count

    def close(self) -> None:
        """Let go of the tracker."""
        self._tracker.close()

    def _remembered(self) -> dict[str, Any]:
        try:
            state = json.loads(self._files.read(f"{FOLDER}/{self._request.name}.json"))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return {}
            raise
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}


def _open(wish: TrackerSpec, run: Files, state: Mapping[str, Any]) -> Tracker:
    if wish.kind in ("tensorboard", "json"):
        default = "tensorboard" if wish.kind == "tensorboard" else "tracked.jsonl"
        if not wish.target and not run.is_local:
            raise ConfigError(
                f"tracker {wish.kind}: {run.path} cannot be appended to; name a place on a disk: "
                f"{wish.kind}:PATH"
            )
        path = Path(wish.target or f"{run.root}/{default}").expanduser()
        return EventFile(path, state) if wish.kind == "tensorboard" else JsonLines(path, state)
    try:
        package = importlib.import_module(PACKAGES[wish.kind])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker {wish.kind}: the package {error.name} is not installed: pip install "
            f"{PACKAGES[wish.kind]}"
        ) from error
    run_id = hashlib.sha256(run.path.encode()).hexdigest()[:16]
    name = run.path.rstrip("/").rpartition("/")[2]
    make = Wandb if wish.kind == "wandb" else Mlflow
    return make(package, wish.target, run_id, name)


class _Appended:
    """A file that is cut to what was remembered of it, and appended to."""

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 (kept open)
        self._kept = int(state.get("bytes", 0))

    @property
    def is_new(self) -> bool:
        """Return whether nothing of it counts yet."""
        return not self._kept

    def append(self, data: bytes) -> dict[str, Any]:
        """Add to what counts; returns how long it is, now that it is durable."""
        size = os.fstat(self._file.fileno()).st_size
        if size > self._kept:
            self._file.truncate(self._kept)
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def keep(self, size: int) -> None:
        """So much of it counts now."""
        self._kept = size

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """One JSON object a line."""

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        """Go on with the file."""
        self._out = _Appended(path, state)

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Add a line for each point."""
        lines = (
            json.dumps({"step": p.number, "unix_s": round(p.unix_s, 3), **p.metrics}) + "\n"
            for p in points
        )
        return self._out.append("".join(lines).encode())

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Let it count."""
        self._out.keep(int(state["bytes"]))

    def close(self) -> None:
        """Close the file."""
        self._out.close()


class EventFile:
    """One event file for the whole run, which TensorBoard reads."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on with the file."""
        self._out = _Appended(folder / "events.out.tfevents.1.elastic", state)

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Add a record for each point."""
        records = [first_record(points[0].unix_s)] if self._out.is_new else []
        records += [scalars(p.unix_s, p.number, p.numbers()) for p in points]
        return self._out.append(b"".join(records))

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Let it count."""
        self._out.keep(int(state["bytes"]))

    def close(self) -> None:
        """Close the file."""
        self._out.close()


class Wandb:
    """One run of Weights & Biases, by the same id for ever; it passes over steps that it knows."""

    def __init__(self, wandb: Any, project: str, run_id: str, name: str) -> None:
        """Begin or go on with the run."""
        self._run = wandb.init(project=project, id=run_id, name=name, resume="allow")

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Log each point under its number."""
        for point in points:
            self._run.log({**point.metrics, "report_unix_s": point.unix_s}, step=point.number)
        return {}

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Nothing more is to be done."""

    def close(self) -> None:
        """Upload what waits."""
        self._run.finish()


class Mlflow:
    """One run of MLflow, found again by a tag; what it has of a step already is not told again."""

    TAG = "elastic.run"

    def __init__(self, mlflow: Any, uri: str, run_id: str, name: str) -> None:
        """Begin or go on with the run."""
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.search_runs(["0"], f"tags.`{self.TAG}` = '{run_id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
        else:
            made = self._client.create_run("0", tags={self.TAG: run_id}, run_name=name)
            self._id = made.info.run_id
        newest = self._client.get_run(self._id).data.metrics
        self._known = int(newest.get("report", 0))

    def show(self, points: Sequence[Point]) -> dict[str, Any]:
        """Log each point; the number of its report comes last, and says that the rest is there."""
        for point in points:
            if point.number <= self._known:
                continue
            at_ms = round(point.unix_s * 1e3)
            values = {**point.numbers(), "report": float(point.number)}
            metrics = [
                self._entities.Metric(name, value, at_ms, point.number)
                for name, value in values.items()
                if math.isfinite(value)
            ]
            self._client.log_batch(self._id, metrics=metrics)
            self._known = point.number
        return {}

    def taken_down(self, state: Mapping[str, Any]) -> None:
        """Nothing more is to be done."""

    def close(self) -> None:
        """Nothing waits."""
