"""Single functions on the cluster, under Ray's names: `elastic.remote` and `elastic.get`.

    @elastic.remote(num_cpus=2)
    def evaluate(path):
        return {"accuracy": ...}

    refs = [evaluate.remote(path) for path in paths]
    print(elastic.get(refs))

Rule: each call is a job of one worker, and behaves like any job: it waits for free resources, is
replaced if its node is lost, and shows in `elastic ps`. There is no object store: a value is
stored in the job's record, so it must be small; a function writes larger ones to storage and
returns their path.

A value that survives a JSON round trip is sent as JSON, any other as a pickle, and unpickling runs
code. So a pickle carries an HMAC, under a random key of this call that only its worker receives:
other jobs, and users who can only write records, get nothing unpickled here.
"""

from __future__ import annotations

import base64
import functools
import hmac
import json
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from elastic.errors import ConfigError, TrainingFailed, UsageError

PICKLE, CODE = "pickle", "code"
"""Keys of the dict that replaces a value which JSON cannot represent."""
PICKLE_BYTES_MAX = 256 * 1024
"""Limit of a pickled value in bytes: the coordinator keeps it with the job, in its store."""
WITHOUT_EFFECT = frozenset({"name", "num_returns", "scheduling_strategy", "max_calls", "memory"})


@dataclass(frozen=True)
class ObjectRef:
    """The result of a call, which may still be pending; `elastic.get` waits for it.

    Attributes:
        job_id: of the job that computes it.
        function: name of the function.
        key: of the HMAC that its value carries.
    """

    job_id: str
    function: str
    key: bytes = field(default=b"", repr=False)

    def get(self, timeout: float | None = None) -> Any:
        """Do as `elastic.get`."""
        return get(self, timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Resources of one call on its node, and how often it is retried."""

    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: Mapping[str, float] | None = None
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | None = None
    max_retries: int = 0
    runtime_env: Mapping[str, Any] | None = None


class RemoteFunction:
    """A function that runs on the cluster; call `remote`."""

    def __init__(self, function: Callable[..., Any], options: _Options) -> None:
        """See `elastic.remote`."""
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Refuse a plain call, as Ray does."""
        name = getattr(self._function, "__name__", "function")
        raise UsageError(f"{name}(...) is a remote function: call {name}.remote(...)")

    def options(self, **options: Any) -> RemoteFunction:
        """Return the same function with other resources."""
        return RemoteFunction(self._function, _taken(options, self._options))

    def remote(self, *args: Any, **named: Any) -> ObjectRef:
        """Submit a call; arguments are pickled, an `ObjectRef` by its value, once that is ready.

        Raises:
            UsageError: in a worker; or an argument cannot be pickled.
        """
        from elastic.client.jobs import Client, new_job_id
        from elastic.train.cluster import check_fits, require_cluster

        values = [get(one) if isinstance(one, ObjectRef) else one for one in args]
        keywords = {k: get(v) if isinstance(v, ObjectRef) else v for k, v in named.items()}
        key = secrets.token_bytes(32)
        spec = self._spec(values, keywords, new_job_id(), key)
        cluster = require_cluster(1, 1)
        entry = spec.entry
        if cluster.env:
            from elastic.core.facts import sorted_pairs

            env = sorted_pairs({**cluster.env, **dict(entry.env)})
            spec = _replace(spec, entry=_replace(entry, env=env))
        with Client(cluster.address, cluster.access) as client:
            if cluster.is_embedded:
                check_fits(spec, [known.node for known in client.status().view.nodes])
            client.submit(spec)
        return ObjectRef(spec.job_id, entry.target, key)

    def _spec(self, args: Sequence[Any], named: Mapping[str, Any], job_id: Any, key: bytes) -> Any:
        from elastic.client.submission import plain_name
        from elastic.core.config import JobSpec
        from elastic.core.facts import Entry, EntryKind, Resources, sorted_pairs
        from elastic.train.cluster_options import worker_env
        from elastic.train.trainer import python_path
        from elastic.worker.process.entry import pack

        options, target = self._options, getattr(self._function, "__qualname__", "function")
        named_ones = {"CPU": options.num_cpus, "GPU": options.num_gpus}
        amounts = {**(options.resources or {}), **{k: v for k, v in named_ones.items() if v}}
        task = functools.partial(call, self._function, args, named, key)
        entry = Entry(
            kind=EntryKind.FUNCTION,
            target=target,
            payload=pack(task, None, {}).payload,
            working_dir=os.getcwd(),
            python_path=python_path(),
            env=sorted_pairs(worker_env(options.runtime_env)),
        )
        return JobSpec(
            job_id=job_id,
            name=f"{plain_name(target.rpartition('.')[2])}-{job_id}",
            entry=entry,
            min_workers=1,
            max_workers=1,
            resources_per_worker=Resources.of({k: float(v) for k, v in amounts.items()}),
            accelerator_type=options.accelerator_type or "",
            label_selector=sorted_pairs(options.label_selector or {}),
            max_failures=options.max_retries,
        )


def _replace(value: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(value, **changes)


def call(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], key: bytes
) -> Any:
    """Call a function on a worker; return its value in a JSON-serializable form.

    Raises:
        UsageError: its value cannot be pickled, or is too large.
    """
    import cloudpickle

    value = function(*args, **named)
    if _is_json(value):
        return value
    name = getattr(function, "__name__", str(function))
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"{name} returned a {type(value).__name__}, which cannot be pickled ({error}): return "
            f"numbers, text, arrays, or objects of these"
        ) from error
    if len(pickled) > PICKLE_BYTES_MAX:
        raise UsageError(
            f"{name} returned a {type(value).__name__} of {len(pickled)} bytes, at most "
            f"{PICKLE_BYTES_MAX} are kept: write it to storage, and return its path"
        )
    return {PICKLE: base64.b64encode(pickled).decode(), CODE: _code(key, pickled)}


def _is_json(value: Any) -> bool:
    """Return whether a value survives a JSON round trip unchanged."""
    try:
        return bool(json.loads(json.dumps(value)) == value) and not (
            isinstance(value, dict) and PICKLE in value
        )
    except (TypeError, ValueError, RecursionError):
        return False


def _code(key: bytes, pickled: bytes) -> str:
    return hmac.new(key, pickled, "sha256").hexdigest()


def value_of(ref: ObjectRef, text: str) -> Any:
    """Return the value of a call, which is unpickled only if its HMAC matches.

    Raises:
        UsageError: the value is not from this call.
    """
    parsed = json.loads(text) if text else None
    if not (isinstance(parsed, dict) and PICKLE in parsed):
        return parsed
    pickled = base64.b64decode(parsed[PICKLE])
    if not ref.key or not hmac.compare_digest(_code(ref.key, pickled), str(parsed.get(CODE))):
        raise UsageError(
            f"elastic.get: the value of {ref.function} (job {ref.job_id}) does not carry this "
            f"call's code, and is not unpickled; pass what {ref.function}.remote(...) returned"
        )
    return pickle.loads(pickled)


@overload
def remote(function: Callable[..., Any], /) -> RemoteFunction: ...
@overload
def remote(**options: Any) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function run on the cluster: `@elastic.remote`, or with options.

    Args:
        function: what to decorate; no class, because there are no actors.
        options: num_cpus, num_gpus, resources, accelerator_type, label_selector: the worker's
            resources, and its node; max_retries: how often it is called again after it raised
            (lost nodes do not count); runtime_env with env_vars. Ray's others are ignored if they
            change nothing here.

    Raises:
        UsageError: it is a class.
        ConfigError: an option is unknown.
    """
    taken = _taken(options, _Options())

    def decorate(what: Callable[..., Any]) -> RemoteFunction:
        if isinstance(what, type):
            raise UsageError(
                f"elastic.remote({what.__name__}): there are no actors; expected a function, or "
                f"train.DataParallelTrainer for a group of workers"
            )
        return RemoteFunction(what, taken)

    return decorate if function is None else decorate(function)


def _taken(options: Mapping[str, Any], base: _Options) -> _Options:
    known = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    if options.get("num_returns", 1) != 1:
        raise ConfigError(f"elastic.remote: num_returns={options['num_returns']!r}: expected 1")
    unknown = sorted(set(known) - set(_Options.__dataclass_fields__))
    if unknown:
        names = ", ".join(_Options.__dataclass_fields__)
        raise ConfigError(f"elastic.remote: {', '.join(unknown)}: expected some of {names}")
    return _replace(base, **known)  # type: ignore[no-any-return]


def get(refs: ObjectRef | Sequence[ObjectRef], *, timeout: float | None = None) -> Any:
    """Wait for the value of a call, or of several as a list, and return it.

    Args:
        refs: what `remote` returned.
        timeout: seconds for all of them, None for no limit.

    Raises:
        Exception: what the function raised: of its class if that is one of Python's own, else a
            `train.UserExceptionWithTraceback`; its cause is a `TrainingFailed` with the traceback.
        TrainingFailed: it was ended for another reason.
        TimeoutError: the timeout has passed; the call continues.
        UsageError: no cluster is connected, or it is no `ObjectRef`.
    """
    from elastic.client.jobs import Client
    from elastic.train.cluster import connected

    several = [refs] if isinstance(refs, ObjectRef) else list(refs)
    for ref in several:
        if not isinstance(ref, ObjectRef):
            raise UsageError(
                f"elastic.get: got a {type(ref).__name__}, expected what f.remote(...) returned"
            )
    cluster = connected()
    over = threading.Event()
    with Client(cluster.address, cluster.access) as client:

        def give_up() -> None:
            over.set()
            client.close()

        timer = threading.Timer(timeout or 0.0, give_up)
        timer.daemon = True
        if timeout is not None:
            timer.start()
        try:
            values = [_value(client, ref, timeout, over) for ref in several]
        finally:
            timer.cancel()
    return values[0] if isinstance(refs, ObjectRef) else values


def _value(client: Any, ref: ObjectRef, timeout: float | None, over: threading.Event) -> Any:
    from elastic.core.facts import ENDED, JobPhase
    from elastic.core.view import JobView
    from elastic.errors import ElasticError
    from elastic.train.failures import failed_on_cluster, failures_of

    record = None
    try:
        for event in client.watch(ref.job_id):
            if isinstance(event, JobView):
                record = event.record
                if record.phase in ENDED:
                    break
    except ElasticError:
        if not over.is_set():
            raise
    if record is None or record.phase not in ENDED:
        raise TimeoutError(f"{ref.function} (job {ref.job_id}) has not ended within {timeout} s")
    if record.phase is JobPhase.SUCCEEDED:
        return value_of(ref, record.result)
    failed: TrainingFailed = failed_on_cluster(record)
    for error in failures_of(record).values():
        raise error from failed
    raise failed
