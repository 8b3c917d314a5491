"""The process of one validation: `python -m elastic.worker.process.validation_process`.

Rule: it dies with the worker that started it, and belongs to no group: of a worker's environment
it keeps everything but the place in one.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback

import click

from elastic.storage import options as storage_options
from elastic.worker.process.environment import PLACE
from elastic.worker.process.main import (
    EXIT_AGENT_GONE,
    die_with_parent,
    name_process,
    set_up_logs,
    set_up_process,
)

OF_GROUP = PLACE | {
    "ROLE_NAME",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "ELASTIC_LOCAL_RANK",
    "ELASTIC_WORKER_ID",
    "WANDB_RUN_ID",
}
"""With these, code for torchrun would try to join the group that trains."""


@click.command(help="Validates one checkpoint; started by a worker.")
@click.argument("parent", type=int)
@click.argument("found_fd", type=int)
def main(parent: int, found_fd: int) -> None:
    """Run the request from standard input, and write the result."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(EXIT_AGENT_GONE)
    # What this starts itself is killed with it; in the worker's session, for the agent to sweep.
    os.setpgid(0, 0)
    name_process("elastic-validat")
    os.set_inheritable(found_fd, False)
    set_up_process()
    set_up_logs()
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):  # The worker's own, not those of its peers.
        own = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[own]
    for name in OF_GROUP:
        os.environ.pop(name, None)
    storage_options.take(os.environ)
    try:
        found = {"metrics": json.loads(_find())}
    except BaseException as error:  # SystemExit of user code is no success either.
        traceback.print_exc()
        found = {"error": "".join(traceback.format_exception_only(type(error), error)).strip()}
    data = json.dumps(found).encode()
    while data:
        data = data[os.write(found_fd, data) :]


def _find() -> str:
    """Call the user's function; returns its metrics as JSON."""
    order = pickle.load(sys.stdin.buffer)
    sys.path[:] = order["sys_path"]
    import torch

    torch.set_num_threads(order["threads"])
    call, path, fn_kwargs = pickle.loads(order["call"])
    return str(call(path, fn_kwargs))


if __name__ == "__main__":
    main()
