"""Converts the options of `elastic submit` to a job spec, and checks them before anything is sent.

Rule: errors that can be detected on this machine are raised here, with advice; a failed submission
leaves nothing behind.
"""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.client.job_options import JobOptions
from elastic.core.config import JobSpec, check_name
from elastic.core.facts import Entry, EntryKind, JobId
from elastic.errors import ConfigError, UsageError

NAME_CHARS_MAX = 60
DEFAULT_STORAGE = "~/elastic_results"


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The command line of `elastic submit`; names are those of the flags."""

    script: str
    args: tuple[str, ...]
    is_module: bool
    name: str
    num_workers: tuple[int, int]
    use_gpu: bool
    backend: str
    max_failures: int
    num_to_keep: int
    storage_path: str
    working_dir: str
    grace: float = 30.0
    shared: JobOptions = field(default_factory=JobOptions)


def job_spec(options: SubmitOptions, *, now: datetime.datetime) -> JobSpec:
    """Return the job.

    Raises:
        ConfigError: a value is not valid.
        UsageError: the script is not on this machine.
    """
    name = options.name or f"{_stem(options)}-{now:%Y%m%d-%H%M%S}"
    check_name("job", name)
    amounts = options.shared.resources
    if options.use_gpu and amounts and not amounts.get("GPU"):
        raise ConfigError(f"--use-gpu, but --resources {amounts} has no GPU: add GPU=1")
    low, high = options.num_workers
    entry = entry_of(options.script, is_module=options.is_module, working_dir=options.working_dir)
    spec = JobSpec(
        job_id=JobId(""),
        name=name,
        entry=replace(entry, args=options.args),
        min_workers=low,
        max_workers=high,
        backend=options.backend,
        max_failures=options.max_failures,
        grace_s=options.grace,
        num_to_keep=options.num_to_keep,
        run_path=run_path_of(options.storage_path, name),
    )
    return options.shared.apply(spec, {"GPU": 1.0} if options.use_gpu else {})


def _stem(options: SubmitOptions) -> str:
    return plain_name(
        options.script.rpartition(".")[2] if options.is_module else Path(options.script).stem
    )


def plain_name(text: str) -> str:
    """Return a text as a valid name: letters and digits, "_" for all else."""
    characters = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in text)
    return characters.lstrip("._-")[:NAME_CHARS_MAX] or "job"


def entry_of(script: str, *, is_module: bool, working_dir: str) -> Entry:
    """Return the entry point of workers, without arguments yet; paths are made absolute.

    Raises:
        UsageError: the script or the directory is not on this machine.
    """
    working_dir = os.path.abspath(working_dir or os.getcwd())
    if not os.path.isdir(working_dir):
        raise UsageError(f"working directory {working_dir} is not a directory on this machine")
    kind, target, first = EntryKind.MODULE, script, working_dir
    if not is_module:
        kind, target = EntryKind.SCRIPT, os.path.abspath(script)
        first = os.path.dirname(target)
        if not os.path.isfile(target):
            raise UsageError(
                f"script {target} is not a file on this machine; name one that is (nodes read it "
                f"from the same path), or use -m for a module"
            )
    return Entry(kind=kind, target=target, working_dir=working_dir, python_path=(first,))


def run_path_of(storage_path: str, name: str) -> str:
    """Return the run directory, storage_path/name, as an absolute path or URL.

    Raises:
        UsageError: it is empty, as from an unset variable, or a URL that has lost a slash, as in
            `Path("s3://bucket")`.
    """
    if not storage_path.strip():
        raise UsageError("the storage path is empty; expected a path or an URL, or leave it out")
    if "://" not in storage_path:
        if lost := re.match(r"([a-z][a-z0-9+.-]+):/", storage_path):
            raise UsageError(
                f"storage path {storage_path!r} is neither a path nor an URL; expected "
                f"{lost[1]}://..., as a str: a pathlib.Path drops one of the two slashes"
            )
        storage_path = os.path.abspath(os.path.expanduser(storage_path))
    return f"{storage_path.rstrip('/')}/{name}"


def directory_of(path: str | Path) -> str:
    """Return a run or study directory that a user names, as an absolute path or URL."""
    parent, slash, name = str(path).rstrip("/").rpartition("/")
    return run_path_of(parent or slash or ".", name)
