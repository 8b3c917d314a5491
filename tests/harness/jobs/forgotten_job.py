"""The plain loop of `steps_job`, in a process that cannot leave a broken group.

So it is where gloo has forgotten a wait: the first process that finds a file `forget` in `--orders`
when its group breaks ends. Run by its path.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic.worker.group.group_resources import GroupResources
from tests.harness.jobs import steps_job


def forget_once(order: Path) -> None:
    """Have gloo not let go of the next group that breaks after this file has come."""
    real = GroupResources.join_gloo

    def join_gloo(resources: GroupResources) -> bool:
        try:
            order.unlink()
        except FileNotFoundError:
            return real(resources)
        return False

    GroupResources.join_gloo = join_gloo  # type: ignore[method-assign]


if __name__ == "__main__":
    if "--orders" in sys.argv:
        forget_once(Path(sys.argv[sys.argv.index("--orders") + 1], "forget"))
    steps_job.main()
