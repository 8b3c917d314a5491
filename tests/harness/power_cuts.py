"""Cut the power of everything, again and again, and let the same script go on.

    python -m tests.harness.power_cuts --cuts 300
    python -m tests.harness.power_cuts --cuts 300 --storage s3://bucket/runs

One process trains and saves its state every few steps; SIGKILL ends it at a moment that a seed
draws, while it writes, commits or deletes as likely as not, and it is started again under the same
name. After each cut, the newest checkpoint that counts must be whole, and not older than the one
before. All state after each step must be, bit by bit, that of a run that nobody disturbed, and
every sample must have been trained with once in each epoch.

The processes are forked from one that has imported torch: an attempt takes half a second.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from elastic.storage.integrity import verify
from elastic.storage.run_directory import RunDirectory
from elastic.worker.process.main import warm_up_here
from tests.harness.chaos_jobs import ENDLESS, ChaosFailed
from tests.harness.jobs import steps_job
from tests.harness.traces import compare, traced

NAME = "cut"
OPTIONS = ("--width", "64", "--samples", "1000")
SAVE_EVERY = 2
LIFE_S_MIN, LIFE_S_MAX = 0.02, 0.9
"""How long a process may live, from its fork: sometimes too short to train at all."""
END_S = 120.0


@dataclass(frozen=True)
class Story:
    """What a run showed.

    Attributes:
        cuts: how often everything was killed.
        steps: of the run, in the end.
        epochs: likewise.
        fresh_starts: attempts after which no checkpoint counted yet.
        torn: checkpoints that were found without a marker, over all attempts.
    """

    cuts: int
    steps: int
    epochs: int
    fresh_starts: int
    torn: int


def train(log: Path, *options: str) -> int:
    """Fork a process that trains with these options, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        steps_job.main([*OPTIONS, *options])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def newest(run: RunDirectory) -> tuple[int, int]:
    """Return the steps of the newest checkpoint that counts, and how many do not.

    Raises:
        DamagedCheckpoint: one that counts is not whole.
    """
    found = run.markers()
    for name, marker in found:
        verify(run.checkpoint(name), marker)
    steps = max((int(marker.about("steps", 0)) for _, marker in found), default=0)
    return steps, len(run.names()) - len(found)


def survive(
    cuts: int, storage: str, *, seed: int = 0, life_s: float = LIFE_S_MAX, folder: Path
) -> Story:
    """Cut so often, then let the run end, and check what came of it.

    Args:
        cuts: SIGKILLs.
        storage: where the run directory goes; a path, or a URL that fsspec knows.
        seed: of the moments.
        life_s: the longest that a process may live; storage that is slow needs more.
        folder: for the log, and the file that lets the run end.

    Raises:
        ChaosFailed: it did not end right.
        DamagedCheckpoint: a checkpoint that counts was not whole.
    """
    draws, run = random.Random(seed), RunDirectory(f"{storage.rstrip('/')}/{NAME}")
    finish, log = folder / "finish", folder / "log"
    options = (
        *("--epochs", str(ENDLESS), "--finish", str(finish), "--trace", str(folder / "trace")),
        *("--save-every", str(SAVE_EVERY), "--name", NAME, "--storage", storage),
    )
    reached = fresh = torn = 0
    for _ in range(cuts):
        pid = train(log, *options)
        time.sleep(draws.uniform(LIFE_S_MIN, life_s))
        os.killpg(pid, signal.SIGKILL) if is_leader(pid) else os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise ChaosFailed(f"an attempt ended by itself:\n{log.read_text()[-4000:]}")
        steps, left = newest(run)
        if steps < reached:
            raise ChaosFailed(f"step {reached} was durable, and now the newest is {steps}")
        reached, torn, fresh = steps, torn + left, fresh + (steps == 0)
    finish.touch()
    pid = train(log, *options)
    wait_for_end(pid, log)
    return check(run, Story(cuts, 0, 0, fresh, torn), folder)


def is_leader(pid: int) -> bool:
    """Return whether a forked process has a session of its own by now."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def wait_for_end(pid: int, log: Path) -> None:
    """Wait for the last attempt; ChaosFailed if it does not end well."""
    until = time.monotonic() + END_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise ChaosFailed(f"the last attempt did not end in {END_S:.0f} s")
        time.sleep(0.02)
    if status:
        raise ChaosFailed(f"the last attempt failed:\n{log.read_text()[-4000:]}")


def check(run: RunDirectory, story: Story, folder: Path) -> Story:
    """Compare each step with a run that nobody disturbed, in a process that is forked for it."""
    from elastic.train.result import Result

    metrics = Result.from_path(run.path).metrics or {}
    log, trace = folder / "undisturbed.log", folder / "undisturbed"
    wait_for_end(train(log, "--epochs", str(metrics["epochs"]), "--trace", str(trace)), log)
    steps = compare(folder / "trace", traced(trace).__getitem__)
    if steps != metrics["steps"]:
        raise ChaosFailed(f"{metrics['steps']} steps are reported, and {steps} were traced")
    return Story(story.cuts, metrics["steps"], metrics["epochs"], story.fresh_starts, story.torn)


def main() -> None:
    """Read the arguments, cut, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--life", type=float, default=LIFE_S_MAX, help="seconds that a process may live at most"
    )
    parser.add_argument("--storage", help="a path or URL; by default a temporary folder")
    parser.add_argument("--one-thread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.one_thread:
        # As the run that it is compared with; torch counts its threads when it is imported.
        again = [sys.executable, "-m", "tests.harness.power_cuts", *sys.argv[1:], "--one-thread"]
        os.execvp("env", ["env", "OMP_NUM_THREADS=1", *again])
    warm_up_here()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        storage = args.storage or f"{folder}/storage"
        story = survive(args.cuts, storage, seed=args.seed, life_s=args.life, folder=Path(folder))
    print(
        f"{story.cuts} power cuts in {time.monotonic() - began:.0f} s: {story.steps} steps in "
        f"{story.epochs} epochs, all state after each step equal to an undisturbed run's, every "
        f"sample once an epoch; {story.torn} torn checkpoints were passed over, "
        f"{story.fresh_starts} attempts began anew"
    )


if __name__ == "__main__":
    main()
