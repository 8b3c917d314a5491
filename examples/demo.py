"""The demonstration behind `make demo`: a cluster on this machine loses parts, training goes on.

Starts a coordinator and three agents as real processes, trains `digits.py` on 2 to 3 workers,
kills a worker, kills a whole node, lets a new node join, and prints what happened and for how long
training paused each time, to the end of the first step of the new group. Then trains once more in
one process, undisturbed, and compares the weights, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from elastic.wire.codec_jobs import TimedNote

HERE = Path(__file__).resolve().parent


@dataclass
class Happening:
    """One row of the final table."""

    what: str
    world_sizes: str
    generation: int
    seconds: float
    survivors: str


class Demo:
    """The story, told while it happens."""

    def __init__(self, cluster: LocalCluster, job_id: str, epochs: int, console: Console) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.console = console
        self.happenings: list[Happening] = []
        self.progress = Progress(
            TextColumn("epoch {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(30),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.progress.add_task("waiting for workers", total=epochs)
        self.seen = 0
        self.group = (0, 0)

    def tell(self, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(text)

    def refresh(self) -> None:
        """Bring the bar up to date with the notes that came."""
        notes = self.cluster.notes
        for timed in notes[self.seen :]:
            self.show(timed)
        self.seen = len(notes)

    def show(self, timed: TimedNote) -> None:
        """Show one note."""
        said = dict(timed.note.fields)
        if timed.note.name == "group_formed":
            self.group = (int(said["generation"]), int(said["world_size"]))
            self.tell(
                f"  generation {said['generation']}: {said['world_size']} workers "
                f"[dim]({said['cause']}: {said['reason']})[/dim]"
            )
        elif timed.note.name == "report":
            metrics = json.loads(said["metrics"])
            generation, size = self.group
            self.progress.update(
                self.task,
                completed=metrics["epoch"] + 1,
                description=f"{size} workers, generation {generation}, "
                f"accuracy {metrics['accuracy']:.1%}",
            )

    def wait(self, holds: Callable[[JobView], bool], what: str) -> JobView:
        """Wait for the job to come so, with the bar moving."""

        def watched(view: JobView) -> bool:
            self.refresh()
            return holds(view)

        return self.cluster.wait(self.job_id, watched, what)

    def wait_epoch(self, more: int) -> JobView:
        """Let training go on for a few epochs, in a group where everyone trains."""
        start = epoch_of(self.cluster.job(self.job_id))
        return self.wait(lambda v: epoch_of(v) >= start + more, f"{more} more epochs")

    def disturb(self, what: str, action: Callable[[JobView], str]) -> None:
        """Do something to the cluster, and wait until the next group's first step is over.

        Args:
            what: the row's name.
            action: does it, and returns the node that is lost, "" for none.
        """
        before = self.cluster.job(self.job_id)
        generation, size = before.record.generation, world_size(before)
        mark = len(self.cluster.notes)
        self.tell(f"[bold]{what}[/bold]")
        lost = action(before)
        note = self.cluster.wait_note(
            "first_step", self.job_id, after=mark, generation=generation + 1
        )
        self.refresh()
        said = dict(note.note.fields)
        after = pids_of(self.cluster.job(self.job_id))
        survivors = {w: p for w, p in pids_of(before).items() if not w.startswith(f"{lost}/")}
        kept = [w for w, pid in survivors.items() if after.get(w) == pid]
        self.happenings.append(
            Happening(
                what,
                f"{size} → {said['world_size']}",
                generation + 1,
                float(said["pause_s"]),
                f"{len(kept)} of {len(survivors)}",
            )
        )

    def table(self) -> Table:
        """Return what happened."""
        table = Table(title="What happened")
        for column in ("event", "workers", "generation", "training paused", "survivors kept"):
            table.add_column(column, no_wrap=True)
        for h in self.happenings:
            table.add_row(
                h.what, h.world_sizes, str(h.generation), f"{h.seconds:.3f} s", h.survivors
            )
        return table


def epoch_of(view: JobView) -> int:
    """Return the epoch that was reported last, -1 before the first."""
    return json.loads(view.record.metrics)["epoch"] if view.record.metrics else -1


def world_size(view: JobView) -> int:
    """Return the size of the newest group."""
    return len(view.record.group.members) if view.record.group else 0


def pids_of(view: JobView) -> dict[str, int]:
    """Return the pid of every worker."""
    return {str(w.report.worker_id): w.report.pid for w in view.workers}


def kill_worker(view: JobView) -> str:
    """SIGKILL the worker with the highest rank; return its node."""
    victim = max(view.workers, key=lambda w: w.rank)
    os.kill(victim.report.pid, signal.SIGKILL)
    return str(victim.node_id)


def digits_job(run_path: Path, epochs: int) -> JobSpec:
    """Return the job: `digits.py` as any user would submit it."""
    script = HERE / "digits.py"
    entry = Entry(
        EntryKind.SCRIPT,
        str(script),
        args=("--epochs", str(epochs)),
        working_dir=str(HERE),
        python_path=(str(HERE),),
    )
    return JobSpec(
        job_id=JobId(""),
        name="digits",
        entry=entry,
        min_workers=2,
        max_workers=3,
        run_path=str(run_path),
        num_to_keep=2,
    )


def run(console: Console, epochs: int) -> int:
    """Tell the story; return the exit code."""
    console.print("[bold]1.[/bold] Starting a coordinator and three agents, one worker each ...")
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as scratch:
        directory = Path(scratch)
        with LocalCluster(nodes=3, directory=directory / "cluster") as cluster:
            console.print(f"   coordinator at {cluster.address}, nodes n1, n2, n3")
            console.print("[bold]2.[/bold] Training a CNN on scikit-learn's digits ...")
            job_id = cluster.submit(digits_job(directory / "run", epochs))
            demo = Demo(cluster, job_id, epochs, console)
            with demo.progress:
                disturb_training(demo, cluster)
                view = demo.wait(
                    lambda v: v.record.phase.value in ("succeeded", "failed", "stopped"), "the end"
                )
                demo.refresh()
            console.print(demo.table())
            if view.record.phase is not JobPhase.SUCCEEDED:
                failure = view.record.failure
                console.print(f"[red]{view.reason}[/red]\n{failure.traceback if failure else ''}")
                return 1
            metrics = json.loads(view.record.metrics)
        console.print(
            f"Trained {epochs} epochs; accuracy on held-out digits: "
            f"[bold]{metrics['accuracy']:.2%}[/bold]"
        )
        console.print("[bold]3.[/bold] Training again, in one process that nobody disturbs ...")
        return compare(console, metrics["weights"], undisturbed(directory / "quiet", epochs))


def undisturbed(directory: Path, epochs: int) -> str:
    """Return the SHA-256 of the weights of a run in one process."""
    command = [
        sys.executable, str(HERE / "digits.py"), "--num-workers", "0", "--epochs", str(epochs),
        "--storage-path", str(directory),
    ]  # fmt: skip
    # As many threads as the workers have: how a sum is divided among threads is seen in its bits.
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return next(
        line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("weights")
    )


def compare(console: Console, disturbed: str, quiet: str) -> int:
    """Say whether the two runs ended with the same bits; return the exit code."""
    console.print(f"   weights of the disturbed run    SHA-256 {disturbed}", soft_wrap=True)
    console.print(f"   weights of the undisturbed run  SHA-256 {quiet}", soft_wrap=True)
    if disturbed == quiet:
        console.print("[bold green]The same bits.[/bold green]")
        return 0
    console.print("[bold red]They differ.[/bold red]")
    return 1


def disturb_training(demo: Demo, cluster: LocalCluster) -> None:
    """Kill a worker, kill a node, let a node join; three workers train before each."""

    def whole(size: int) -> Callable[[JobView], bool]:
        return lambda v: world_size(v) == size and v.record.phase is JobPhase.RUNNING

    demo.wait(whole(3), "three workers to train")
    demo.wait_epoch(3)
    demo.disturb("a worker is SIGKILLed", kill_worker)
    demo.wait(whole(3), "the spare to take the slot")
    demo.wait_epoch(3)

    def kill_node(_: JobView) -> str:
        cluster.kill_node("n3")
        return "n3"

    def start_node(_: JobView) -> str:
        cluster.start_node("n4")
        return ""

    demo.disturb("node n3 dies (agent and worker)", kill_node)
    demo.wait_epoch(3)
    demo.disturb("node n4 joins", start_node)
    demo.wait_epoch(2)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--picture", type=Path, help="an SVG to write of what was printed")
    args = parser.parse_args()
    console = Console(highlight=False)
    if args.picture is not None:
        console = Console(highlight=False, width=108, record=True, color_system="truecolor")
    elif not console.is_terminal:
        console = Console(highlight=False, width=100)
    code = run(console, args.epochs)
    if args.picture is not None:
        console.save_svg(str(args.picture), title="make demo")
    sys.exit(code)


if __name__ == "__main__":
    main()
