"""Any fact and any message, for hypothesis.

Rule: strategies are derived from the dataclasses, so that a new field is drawn without a change
here; only what a dataclass refuses, or a wire cannot carry, is spelled out.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from elastic.core.config import JobSpec
from elastic.core.events.shared import Note
from elastic.core.facts import Entry, EntryKind, Resources
from elastic.core.messages import AgentMessage, CoordinatorMessage, PipeToAgent, PipeToWorker
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView, JobView, NodeView

MOMENT = 2**61
"""The difference of two moments must fit into 63 bits: ages travel, moments do not."""
WIDE = ("index", "number", "steps", "sequence", "incarnation")
"""Whole numbers that count for ever; all others fit into 32 bits."""

TEXTS = st.text(max_size=20)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}", fullmatch=True)


def whole_numbers(name: str) -> st.SearchStrategy[int]:
    """Values that a field of this name may have."""
    if name == "generation":
        return st.integers(0, 2**64 - 1)
    if name.endswith("_ns"):
        return st.integers(-MOMENT, MOMENT)
    if name in WIDE:
        return st.integers(-(2**63), 2**63 - 1)
    return st.integers(-(2**31), 2**31 - 1)


def of_hint(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field."""
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([of_hint(name, option) for option in get_args(hint)])
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return st.lists(of_hint(name, items[0]), max_size=4).map(tuple)
        return st.tuples(*[of_hint(name, item) for item in items])
    kind = getattr(hint, "__supertype__", hint)
    if dataclasses.is_dataclass(kind):
        return facts(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    plain: Mapping[Any, Callable[[], st.SearchStrategy[Any]]] = {
        str: lambda: TEXTS,
        bytes: lambda: st.binary(max_size=40),
        bool: st.booleans,
        float: lambda: st.floats(allow_nan=False),
        int: lambda: whole_numbers(name),
        types.NoneType: st.none,
    }
    return plain[kind]()


@cache
def facts(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a dataclass of elastic.core."""
    special = {Resources: RESOURCES, JobSpec: SPECS}
    if kind in special:
        return special[kind]
    hints = get_type_hints(kind)
    return st.builds(
        kind,
        **{
            field.name: of_hint(field.name, hints[field.name]) for field in dataclasses.fields(kind)
        },
    )


def union(kinds: Any) -> st.SearchStrategy[Any]:
    """Instances of any member of a union of dataclasses."""
    return st.one_of([facts(kind) for kind in get_args(kinds)])


RESOURCES = st.dictionaries(TEXTS, st.integers(1, 2**64 - 1), max_size=4).map(
    lambda amounts: Resources(tuple(sorted(amounts.items())))
)


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    """Draw a specification that `JobSpec` accepts."""
    replica = draw(st.integers(1, 8))
    low = draw(st.integers(1, 1000))
    return JobSpec(
        job_id=draw(TEXTS),
        name=draw(NAMES),
        entry=draw(facts(Entry)),
        min_workers=replica * low,
        max_workers=replica * draw(st.integers(low, 2000)),
        workers_per_replica=replica,
        resources_per_worker=draw(RESOURCES),
        strategy=draw(of_hint("strategy", get_type_hints(JobSpec)["strategy"])),
        accelerator_type=draw(TEXTS),
        label_selector=tuple(draw(st.lists(st.tuples(TEXTS, TEXTS), max_size=3))),
        backend=draw(st.sampled_from(["auto", "gloo", "nccl"])),
        collective_timeout_s=draw(
            st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
        ),
        hang_timeout_s=draw(st.floats(0, allow_nan=False, allow_infinity=False)),
        max_failures=draw(st.integers(-1, 2**31 - 1)),
        run_path=draw(TEXTS),
        num_to_keep=draw(st.integers(1, 2**31 - 1) | st.just(-1)),
        score_attribute=draw(TEXTS),
        score_order=draw(st.sampled_from(["max", "min"])),
    )


SPECS = job_specs()

AGENT_MESSAGES = union(AgentMessage)
COORDINATOR_MESSAGES = union(CoordinatorMessage)
TO_WORKER = union(PipeToWorker)
FROM_WORKER = union(PipeToAgent)
RECORDS = facts(JobRecord)
NOTES = facts(Note)
NODE_VIEWS = facts(NodeView)
JOB_VIEWS = facts(JobView)
CLUSTER_VIEWS = facts(ClusterView)
SCRIPT = Entry(kind=EntryKind.SCRIPT, target="train.py")
"""An entry point where it does not matter which."""
