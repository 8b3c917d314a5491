"""The command `elastic start`, which makes this machine a node or head, and its part of `stop`.

The names are those of `ray start` and `ray stop`. Permanent clusters (etcd, certificates, roles)
are set up with `elastic-coord serve` and `elastic-agent` directly.
"""

from __future__ import annotations

import os
from functools import partial

import click

from elastic.client.local_daemons import (
    StartedCluster,
    find_started,
    join,
    node_flags,
    own_address,
    start_head,
    stop_started,
)
from elastic.client.terminal import ClusterTarget
from elastic.client.values import parse_amounts
from elastic.runtime.worker_ports import FLAG

DEFAULT_PORT = 7070
_print_line = partial(click.echo, err=True)


@click.command()
@click.option("--head", is_flag=True, help="Start the coordinator, too.")
@click.option(
    "--address", default="", metavar="HOST:PORT", help="Join the cluster of this coordinator."
)
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Of the coordinator, with --head.",
)
@click.option(
    "--node-ip-address", default="", metavar="ADDRESS",
    help="Where other nodes reach this one; 127.0.0.1 for this machine alone.  "
    "[default: by route]",
)  # fmt: skip
@click.option(
    "--num-cpus", type=click.IntRange(min=0), metavar="N",
    help="Workers at once, and CPUs to offer.  [default: what is there]",
)  # fmt: skip
@click.option("--num-gpus", type=click.IntRange(min=0), metavar="N", help="GPUs to offer.")
@click.option(
    "--resources", default="", callback=parse_amounts, metavar="NAME=N,...", help="Others to offer."
)
@click.option("--labels", default="", metavar="NAME=VALUE,...", help="For label selectors.")
@click.option(
    FLAG, default="", metavar="LOW-HIGH", help="Ports that workers listen on, see elastic-agent."
)
@click.option(
    "--store", default="memory:", show_default=True, metavar="URL",
    help="Of the coordinator: sqlite:PATH outlives a restart.",
)  # fmt: skip
@click.option(
    "--token-file", default="", metavar="PATH",
    help="File with the join token; --head creates one and prints its path.",
)  # fmt: skip
@click.pass_obj
def start(
    target: ClusterTarget,
    *,
    head: bool,
    address: str,
    port: int,
    node_ip_address: str,
    num_cpus: int | None,
    num_gpus: int | None,
    resources: dict[str, float],
    labels: str,
    worker_ports: str,
    store: str,
    token_file: str,
) -> None:
    """Bring this machine into a cluster: as its first one (--head), or another (--address)."""
    if head == bool(address):
        raise click.UsageError("expected --head, or --address HOST:PORT of a head")
    node = node_flags(num_cpus=num_cpus, num_gpus=num_gpus, resources=resources)
    if labels:
        node += ["--labels", labels]
    if worker_ports:
        node += [FLAG, worker_ports]
    token_file = os.path.abspath(token_file or target.token_file) if (
        token_file or target.token_file
    ) else ""  # fmt: skip
    if head:
        host = node_ip_address or own_address()
        started = start_head(
            host,
            port,
            [*node, "--host", host],
            token_file=token_file,
            store=store,
            print_line=_print_line,
        )
    else:
        if node_ip_address:
            node += ["--host", node_ip_address]
        started = join(address, node, token_file=token_file, print_line=_print_line)
    _print_started(started)


def _print_started(started: StartedCluster) -> None:
    if not started.is_head:
        click.echo(f"this machine is a node of {started.address}; it leaves with: elastic stop")
        return
    click.echo(f"coordinator: {started.address}")
    click.echo(f"join token:  {started.token_file}")
    click.echo("commands and scripts on this machine find it by themselves")
    if not started.address.startswith("127."):
        click.echo(
            f"another node, with a copy of the token:\n  elastic start --address "
            f"{started.address} --token-file PATH\na script elsewhere:\n  "
            f"elastic.init('{started.address}', token_file=PATH)"
        )
    click.echo("end it: elastic stop")


def stop_machine(*, force: bool) -> None:
    """End the daemons that `elastic start` started here.

    Raises:
        UsageError: there are none.
    """
    started = find_started()
    if started is None:
        raise click.UsageError(
            "nothing that 'elastic start' started runs on this machine; name a JOB to stop one"
        )
    for daemon in stop_started(started, force=force, print_line=_print_line):
        click.echo(f"{daemon.part} (pid {daemon.process.pid}) has ended", err=True)
