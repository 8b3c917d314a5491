"""The command `elastic`: submit, show and stop jobs, show their checkpoints, drain nodes.

Rule: a flag wins over its variable, that over the default; the environment is read here only.
Exit codes: 0 done; 1 the job failed; 2 wrong usage; 69 no coordinator answers; 70 a bug; 75 the
job was stopped and can be continued; 78 a setting is wrong; 124 timed out; 130 interrupted.
"""

from __future__ import annotations

import click
from click.core import ParameterSource

from elastic.client import (
    checkpoints,
    daemons,
    events,
    job_commands,
    node_commands,
    profiling,
    query_commands,
    run,
    stacks,
    top,
    tracking,
    tuning,
)
from elastic.client.local_daemons import find_started
from elastic.client.terminal import ClusterTarget, CommandGroup, with_timeout
from elastic.runtime.access_options import tls_options, token_option
from elastic.version import __version__

DEFAULT_ADDRESS = "127.0.0.1:7070"


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 the job failed; 2 used wrongly; 69 no coordinator answers; 75 "
    "the job was stopped, it can be submitted again; 78 a setting is wrong; 124 timed out; 130 "
    "interrupted.",
)
@click.option(
    "-c", "--coord", envvar="ELASTIC_COORD", default=DEFAULT_ADDRESS, show_default=True,
    metavar="HOST:PORT,...", help="Coordinators to try.  [env: ELASTIC_COORD]",
)  # fmt: skip
@token_option
@tls_options
@click.version_option(__version__, prog_name="elastic")
@click.pass_context
def main(context: click.Context, coord: str, token_file: str, **tls: str) -> None:
    """Train on a cluster that loses machines."""
    flags: list[str] = []
    for name, value in (("coord", coord), ("token_file", token_file), *tls.items()):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flags += ["--" + name.replace("_", "-"), value]
    if not any((flags, token_file, *tls.values())) and (
        context.get_parameter_source("coord") is ParameterSource.DEFAULT
    ):
        started = find_started()
        if started is not None:
            coord, token_file = started.address, started.token_file
    context.obj = ClusterTarget(coord, token_file, tuple(flags), tls)


for command in (
    job_commands.submit,
    query_commands.ps,
    query_commands.status,
    query_commands.logs,
    events.events,
    stacks.stack,
    profiling.profile,
    top.top,
    checkpoints.checkpoint,
    checkpoints.checkpoints,
    node_commands.pause,
    node_commands.resume,
    node_commands.scale,
    job_commands.stop,
    query_commands.nodes,
    node_commands.cordon,
    node_commands.uncordon,
    job_commands.drain,
    query_commands.version,
):
    main.add_command(with_timeout(command))
main.add_command(daemons.start)
main.add_command(run.run)
main.add_command(checkpoints.verify)
main.add_command(tracking.track)
main.add_command(tuning.tune)


if __name__ == "__main__":
    main()
