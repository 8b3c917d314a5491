"""The commands that control running jobs and nodes: pause, resume, scale, cordon, uncordon.

Rule: each prints what it has begun, and what follows automatically; all are idempotent.
"""

from __future__ import annotations

import click

from elastic.client.job_commands import GONE, timeout_option
from elastic.client.jobs import Client
from elastic.client.polling import wait_until
from elastic.client.terminal import ClusterTarget
from elastic.client.text_format import trains_outside, workers
from elastic.core.facts import JobPhase, NodeId, NodePhase
from elastic.core.view import NodeView
from elastic.errors import Refused


@click.command()
@click.argument("job")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until its workers ended.")
@timeout_option
@click.pass_obj
def pause(target: ClusterTarget, job: str, wait: bool, timeout_s: float | None) -> None:
    """Have JOB (id or name) give all its workers back; resume it with: elastic resume JOB.

    A checkpoint is taken first, then the workers leave at a boundary. The job keeps its name, and
    is paused after a restart of the coordinator too.
    """
    again = target.command("resume", job)
    with target.connect() as client:
        client.call_timeout_s = timeout_s
        view = client.get(job)
        job_id = view.record.spec.job_id
        client.pause(job_id)
        if wait:
            if view.workers:
                click.echo(f"job {job} pauses once it is saved; end the pause: {again}", err=True)
            _wait_until_paused(client, job_id, again, timeout_s)
    click.echo(f"job {job} {'is paused' if wait else 'pauses'}; resume: {again}", err=True)


def _wait_until_paused(client: Client, job_id: str, again: str, timeout_s: float | None) -> None:
    """Poll until the job holds no workers; print what it waits for.

    Raises:
        Refused: it ended, or was resumed.
        TimeoutError: it still holds some at the end of the time.
        Unavailable: see `wait_until`.
    """

    def check() -> str:
        view = client.get(job_id)
        phase, name = view.record.phase, view.record.spec.name
        if phase is JobPhase.PAUSED and not view.workers:
            return ""
        if view.has_ended():
            raise Refused(f"job {name} has ended meanwhile: {phase.value}")
        if not view.record.paused:
            raise Refused(f"job {name} was resumed meanwhile: {view.reason}")
        if phase is JobPhase.PAUSED:
            return f"{workers(len(view.workers))} to end"
        return f"job {name} {view.reason}"

    wait_until(client, check, timeout_s, f"the pause continues; end it: {again}")


@click.command()
@click.argument("job")
@click.pass_obj
def resume(target: ClusterTarget, job: str) -> None:
    """Resume a paused JOB (id or name) where it was, as soon as its workers fit."""
    with target.connect() as client:
        client.resume(job)
    click.echo(f"job {job} resumes; state: {target.command('status', job)}", err=True)


@click.command()
@click.argument("job")
@click.option("--min", "low", type=click.IntRange(min=1), metavar="N", help="Smallest group.")
@click.option("--max", "high", type=click.IntRange(min=1), metavar="N", help="Largest group.")
@click.pass_obj
def scale(target: ClusterTarget, job: str, low: int | None, high: int | None) -> None:
    """Set how many workers JOB (id or name) may have; its group follows at a boundary.

    At most as many as a step has micro-batches: the maximum that it was submitted with, or
    global_batch_size / batch_size of its loader if that is more, and it trains. Code with a loop of
    its own, as scripts for torchrun have, may have any number, and follows when it reports a
    checkpoint or its group is formed anew.
    """
    if low is None and high is None:
        raise click.UsageError("expected --min N, --max N, or both")
    with target.connect() as client:
        client.scale(job, min_workers=low or 0, max_workers=high or 0)
        view = client.get(job)
    bounds = view.record.bounds
    click.echo(f"job {job} may have {bounds[0]} to {bounds[1]} workers", err=True)
    if trains_outside(view):
        click.echo(
            "it trains in no loop over train.epochs() now: its group follows when it reports a "
            "checkpoint, or is formed anew",
            err=True,
        )


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--reason", default="", help="Shown with the node.")
@click.pass_obj
def cordon(target: ClusterTarget, nodes: tuple[str, ...], reason: str) -> None:
    """Let no new workers start on nodes; those that are there stay. See also: elastic drain."""
    _cordon(target, nodes, cordoned=True, reason=reason)


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.pass_obj
def uncordon(target: ClusterTarget, nodes: tuple[str, ...]) -> None:
    """Let new workers start on nodes again."""
    _cordon(target, nodes, cordoned=False, reason="")


def _cordon(target: ClusterTarget, nodes: tuple[str, ...], *, cordoned: bool, reason: str) -> None:
    """Cordon or uncordon nodes and print their state; raise the first refusal after all of them."""
    refusals: list[Refused] = []
    changed: list[str] = []
    with target.connect() as client:
        for node in nodes:
            try:
                client.cordon(node, cordoned=cordoned, reason=reason)
            except Refused as error:
                refusals.append(error)
            else:
                changed.append(node)
        views: dict[NodeId, NodeView] = {}
        if changed and not cordoned:
            views = {view.node.node_id: view for view in client.status().view.nodes}
    for node in changed:
        click.echo(f"node {node} {_hosting(views.get(NodeId(node)), cordoned=cordoned)}", err=True)
    for refusal in refusals[1:]:
        click.echo(f"elastic: {refusal}", err=True)
    if refusals:
        raise refusals[0]


def _hosting(view: NodeView | None, *, cordoned: bool) -> str:
    """Return a phrase for whether a node gets workers after the cordon or uncordon."""
    if cordoned:
        return "takes no new workers"
    if view is None or view.phase in GONE:
        return "is not cordoned when it comes back; it is not there now"
    if view.phase is NodePhase.DRAINING:
        return "is cordoned no more, but drains: it takes no new workers"
    return "takes workers again"
