"""How long a broken gloo group holds its members, and how soon the next one stands.

Run as `python -m bench.abort [--worlds 2,3,4,5,6] [--rounds 20]`, from the project's root. All but
one member of a group wait in an all-reduce for the one that does not come; they are aborted all at
once, then the same processes form the next group. Loopback, all processes on this machine.
"""

from __future__ import annotations

from statistics import median

import click
from rich.console import Console
from rich.table import Table

from tests.workers.members import Crew, abort_all, all_ask


def measure(crew: Crew, world: int, rounds: int) -> tuple[list[float], list[float]]:
    """Break and form a group again and again.

    Returns:
        Milliseconds from abort until a member's main thread is free, for each member that waited;
        and from the call of `form` until its return, of the slowest member of each group.
    """
    members = crew.take(world)
    freed: list[float] = []
    stood: list[float] = []
    for number in range(rounds + 1):
        answers = crew.form(members)
        if any(one.error for one in answers):
            raise RuntimeError(f"world {world}: {[one.error for one in answers]}")
        all_ask(members, "all_reduce")
        orders = [one.tell("wait_work") for one in members[1:]]
        all_ask(members[1:], "hung_up")
        times = abort_all(members[1:], orders)
        all_ask(members[:1], "abort")
        if number:  # the first group of a crew is formed from processes that were just started
            freed += times
            stood.append(max(one.ms for one in answers))
    return freed, stood


@click.command()
@click.option("--worlds", default="2,3,4,5,6", show_default=True, help="Group sizes.")
@click.option("--rounds", default=20, show_default=True, help="Groups of each size.")
def main(worlds: str, rounds: int) -> None:
    """Print the table."""
    table = Table(title="gloo, milliseconds")
    for column in ("world", "abort median", "abort max", "re-form median", "re-form max"):
        table.add_column(column, justify="right")
    crew = Crew()
    try:
        for world in map(int, worlds.split(",")):
            freed, stood = measure(crew, world, rounds)
            cells = [median(freed), max(freed), median(stood), max(stood)]
            table.add_row(str(world), *(f"{ms:.1f}" for ms in cells))
    finally:
        crew.end()
    Console().print(table)


if __name__ == "__main__":
    main()
