"""Who may call what: the table is complete, and says what is meant."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.coord.roles import RULES, Caller, Role, caller_of_uri
from elastic.coord.server import add_services
from elastic.errors import NotPermitted


class Recorder:
    """Stands in for a gRPC server, and takes down the methods that are registered with it."""

    def __init__(self) -> None:
        self.methods: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self.methods |= set(handler._method_handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods |= {f"/{service}/{name}" for name in handlers}


def registered_methods() -> set[str]:
    recorder: Any = Recorder()
    nothing: Any = Recorder()
    nothing.leader_state = None
    from grpc_health.v1 import health

    add_services(recorder, nothing, health.aio.HealthServicer())
    return set(recorder.methods)


def test_every_method_that_a_coordinator_serves_has_a_rule_and_every_rule_a_method() -> None:
    served = registered_methods()
    assert len(served) > 10, "the recorder saw nothing: does gRPC register in another way now?"
    assert served - set(RULES) == set(), "add them to RULES in elastic/coord/roles.py"
    # Newer releases of grpcio-health-checking serve List, older ones do not.
    assert set(RULES) - served <= {"/grpc.health.v1.Health/List"}


def test_only_probes_are_answered_without_credentials() -> None:
    unguarded = {method for method, rule in RULES.items() if rule.roles is None}
    assert all(method.startswith("/grpc.health.v1.Health/") for method in unguarded)


def test_what_a_reader_may_call_changes_nothing() -> None:
    may_read = {m for m, rule in RULES.items() if rule.roles and Role.READ in rule.roles}
    assert not [method for method in may_read if RULES[method].audited]


def test_a_node_may_attach_and_nothing_else() -> None:
    may = {m for m, r in RULES.items() if r.roles and Role.NODE in r.roles and not r.general}
    assert may == {"/elastic.v1.Agents/Attach"}


def test_a_method_without_a_rule_is_refused_to_everybody() -> None:
    with pytest.raises(NotPermitted, match="no method"):
        Caller(Role.ADMIN).check_may_call("/elastic.v1.Jobs/Forgotten")


@pytest.mark.parametrize(
    "uri",
    [
        "", "elastic://", "elastic://root/n1", "elastic://node/", "elastic://node/a/b",
        "https://node/n1", "elastic://NODE/n1", "elastic://node/n1\n", " elastic://node/n1",
        "elastic://node/" + "a" * 101, "elastic://node/../all",
    ],
)  # fmt: skip
def test_a_certificate_for_something_else_names_nobody(uri: str) -> None:
    assert caller_of_uri(uri) is None


@pytest.mark.parametrize(
    ("caller", "node_id", "may"),
    [
        (Caller(Role.NODE, "n1", "certificate", is_bound=True), "n1", True),
        (Caller(Role.NODE, "n1", "certificate", is_bound=True), "n2", False),
        (Caller(Role.NODE, "ab12", "token"), "n2", True),
        (Caller(Role.ADMIN, "coordinator", "certificate", is_bound=True), "n2", True),
    ],
)
def test_a_node_attaches_as_itself_only(caller: Caller, node_id: str, may: bool) -> None:
    if may:
        caller.check_may_attach(node_id)
    else:
        with pytest.raises(NotPermitted, match="--node-id n1"):
            caller.check_may_attach(node_id)


def test_who_submits_changes_jobs_of_his_own_name_only_and_an_admin_all() -> None:
    alice, nameless = Caller(Role.SUBMIT, "alice", "token"), Caller(Role.SUBMIT, "", "token")
    alice.check_may_change("digits", "alice")
    nameless.check_may_change("digits", "")
    Caller(Role.ADMIN).check_may_change("digits", "alice")
    for caller, owner in ((alice, "bob"), (alice, ""), (nameless, "alice")):
        with pytest.raises(NotPermitted, match="ask its owner"):
            caller.check_may_change("digits", owner)
    for method in ("Drain", "Cordon"):
        with pytest.raises(NotPermitted, match="needs the role admin"):
            alice.check_may_call(f"/elastic.v1.Cluster/{method}")
