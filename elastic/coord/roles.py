"""Authorization: roles, callers, and one table with every method that a coordinator serves.

Rule: a method that is not in the table is refused to all callers. Without authentication, every
caller is `ANYONE`, with all rights: then only trusted callers can reach the address.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from elastic.core.config import NAME_PATTERN
from elastic.errors import NotPermitted
from elastic.runtime.certificates import CertificateSummary


class Role(Enum):
    """What a token or certificate permits."""

    NODE = "node"
    """Attach as an agent: run workers, report their state."""
    SUBMIT = "submit"
    """Run code on all nodes, control and stop one's own jobs; and all that READ may."""
    READ = "read"
    """Read all state, including jobs and their output."""
    ADMIN = "admin"
    """Everything, also on jobs of others: the single token, the coordinator's certificate."""


@dataclass(frozen=True)
class Rule:
    """The access rule of one method.

    Attributes:
        roles: any of these; None for all callers, also without credentials.
        audited: each call writes a line to the audit log, because it changes something.
        general: generic tools call it: it needs no protocol version, and a coordinator that does
            not lead answers it, too.
    """

    roles: frozenset[Role] | None
    audited: bool = False
    general: bool = False


_NODES = Rule(frozenset({Role.NODE, Role.ADMIN}))
_CHANGES = Rule(frozenset({Role.SUBMIT, Role.ADMIN}), audited=True)
_GOVERNS = Rule(frozenset({Role.ADMIN}), audited=True)
_READS = Rule(frozenset({Role.READ, Role.SUBMIT, Role.ADMIN}))
_PROBES = Rule(None, general=True)
_DESCRIBES = Rule(frozenset(Role), general=True)

RULES: dict[str, Rule] = {
    "/elastic.v1.Agents/Attach": _NODES,
    "/elastic.v1.Jobs/Submit": _CHANGES,
    "/elastic.v1.Jobs/Stop": _CHANGES,
    "/elastic.v1.Jobs/Checkpoint": _CHANGES,
    "/elastic.v1.Jobs/Pause": _CHANGES,
    "/elastic.v1.Jobs/Resume": _CHANGES,
    "/elastic.v1.Jobs/Scale": _CHANGES,
    "/elastic.v1.Jobs/Get": _READS,
    "/elastic.v1.Jobs/List": _READS,
    "/elastic.v1.Jobs/Watch": _READS,
    "/elastic.v1.Jobs/Events": _READS,
    "/elastic.v1.Jobs/Stacks": _CHANGES,
    "/elastic.v1.Jobs/Profile": _CHANGES,
    "/elastic.v1.Jobs/Logs": _READS,
    "/elastic.v1.Cluster/Status": _READS,
    "/elastic.v1.Cluster/Drain": _GOVERNS,
    "/elastic.v1.Cluster/Cordon": _GOVERNS,
    # Probes have no credentials: they learn only whether this coordinator answers.
    "/grpc.health.v1.Health/Check": _PROBES,
    "/grpc.health.v1.Health/List": _PROBES,
    "/grpc.health.v1.Health/Watch": _PROBES,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _DESCRIBES,
}
"""Every method of every registered service; tests/unit/test_roles.py checks that."""


@dataclass(frozen=True)
class Caller:
    """The caller of a method.

    Attributes:
        role: what it may do.
        name: of the token or certificate, "" if it has none.
        how: how it was identified: "token", "certificate" or "open door".
        token_id: of the token that must stay valid during the call, "" for none.
        shown: the certificate that must stay valid, None for none.
        is_bound: it may attach only as the node of its own name.
    """

    role: Role
    name: str = ""
    how: str = "open door"
    token_id: str = ""
    is_bound: bool = False
    shown: CertificateSummary | None = None

    def __str__(self) -> str:
        """Return "token n1 (node)"."""
        name = f" {self.name}" if self.name else ""
        return f"{self.how}{name} ({self.role.value})"

    def check_may_call(self, method: str) -> None:
        """Check that this caller may call a method.

        Raises:
            NotPermitted: this caller's role may not call it.
        """
        rule = RULES.get(method)
        if rule is None:
            raise NotPermitted(f"{method} is no method of this coordinator that anybody may call")
        if rule.roles is None or self.role in rule.roles:
            return
        wanted = " or ".join(role.value for role in Role if role in rule.roles)
        raise NotPermitted(
            f"{self} may not call {method.rpartition('/')[2]}: that needs the role {wanted}; ask "
            f"for a token ('elastic-coord tokens create --role ...') or a certificate "
            f"('elastic-coord certs issue --role ...') of that role"
        )

    def check_may_change(self, job: str, submitter: str) -> None:
        """Check that this caller may change a job.

        Args:
            job: its name, for the text.
            submitter: name of the token or certificate that submitted it, "" if it had none.

        Raises:
            NotPermitted: it is another user's.
        """
        if self.role is Role.ADMIN or self.name == submitter:
            return
        raise NotPermitted(
            f"job {job} was submitted by {submitter or 'a token without a name'}, {self} may read "
            f"it and change nothing: ask its owner, or somebody of the role {Role.ADMIN.value}"
        )

    def check_may_attach(self, node_id: str) -> None:
        """Check that an agent uses the node name of its credentials.

        Raises:
            NotPermitted: its token or certificate was issued to another node.
        """
        if self.role is not Role.NODE or not self.is_bound or self.name == node_id:
            return
        raise NotPermitted(
            f"{self} was made out to node {self.name} and cannot be used as node {node_id}: start "
            f"the agent with --node-id {self.name}, or give it a {self.how} of its own"
        )


ANYONE = Caller(Role.ADMIN)

CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
"""The caller of the method that this task serves; set by the guard."""

_URI = re.compile(rf"elastic://([a-z]+)/({NAME_PATTERN.pattern})")


def caller_uri(role: Role, name: str) -> str:
    """Return the URI name for a certificate, such as elastic://node/gpu-01."""
    return f"elastic://{role.value}/{name}"


def caller_of_uri(uri: str) -> Caller | None:
    """Return the caller that such a URI names, None if it is not one of ours."""
    match = _URI.fullmatch(uri)
    if match is None or match[1] not in {role.value for role in Role}:
        return None
    return Caller(Role(match[1]), match[2], "certificate", is_bound=True)
