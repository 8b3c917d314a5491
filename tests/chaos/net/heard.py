"""A run whose copies cross a network on which somebody listens; run by the test.

    unshare --net python -m tests.chaos.net.heard DIRECTORY

Nodes show a token. The node that trains is killed, and the run goes on from a copy of its state on
another one. Prints what was heard meanwhile, and how the job ended, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic.client.jobs import Client
from elastic.core.world import ENDED
from elastic.runtime.copy_wire import GREETING
from elastic.testing.chaos_jobs import chaos_job, with_arguments
from tests.chaos.net.cluster import NetCluster
from tests.chaos.net.switch import Switch

NEVER = 1_000_000
TOKEN = "a-token-that-is-long-enough-0123456789"
NODES = ("a", "b", "c")


@dataclass
class Listener(Switch):
    """A network on which somebody reads along, and counts who says what copies begin with."""

    greetings: int = 0

    def heard(self, packet: bytes) -> None:
        """Read a packet that passes."""
        self.greetings += GREETING in packet


class Cluster(NetCluster):
    """One coordinator and agents that show a token, each on a host of its own."""

    def __enter__(self) -> Cluster:
        token = self.directory / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        try:
            for name in ("user", "c1", *NODES):
                self.switch.add(name)
            shown = ("--token-file", str(token))
            self._spawn(
                "c1", sys.executable, "-m", "elastic.coord.cli", "serve", *shown,
                "--listen", self.endpoint("c1"), "--store", f"sqlite://{self.directory}/store",
            )  # fmt: skip
            for name in NODES:
                self._spawn(
                    name, sys.executable, "-m", "elastic.agent.cli", "--node-id", name, *shown,
                    "--coord", self.endpoint("c1"), "--workers", "1", "--spares", "0",
                    "--run-dir", str(self.directory / "run" / name),
                    "--log-dir", str(self.directory / "logs" / name),
                )  # fmt: skip
            self.client = Client(self.endpoint("c1"), TOKEN)
            self.wait_nodes(len(NODES))
        except BaseException:
            self.close()
            raise
        return self


def play(directory: Path) -> dict[str, object]:
    """Return what was heard, and whether the run has the hash of an undisturbed one."""
    switch = Listener()
    with Cluster(directory, switch) as cluster:
        story = chaos_job("steps", "heard", workers=1, directory=directory, save_every=NEVER)
        story = with_arguments(story, "--copy-every", "5")
        job_id = cluster.client.submit(story.spec)

        def wait(holds: Callable[[], bool], what: str) -> None:
            cluster.wait_until(holds, what)

        def took() -> list[str]:
            return [name for name in NODES if "copy_taken" in cluster.log(name)]

        wait(lambda: bool(took()), "a copy")
        group = cluster.client.get(job_id).record.group
        assert group is not None
        trains = str(group.members[0].node_id)
        cluster.kill(trains)
        # Told by the worker that has fetched it.
        logs = directory / "logs"

        def fetched() -> bool:
            texts = [path.read_text(errors="replace") for path in logs.rglob("*.log")]
            return any("copy_fetched" in text for text in texts) or "copy_given" in "".join(
                cluster.log(name) for name in NODES
            )

        wait(fetched, "a copy that is fetched")
        story.finish.touch()
        wait(lambda: cluster.client.get(job_id).record.phase in ENDED, "the end")
        verdict = story.check(cluster.client.get(job_id)).text
        text = "".join(cluster.log(name) for name in NODES)
        return {
            "passed": switch.passed,
            "greetings": switch.greetings,
            "sent": len(re.findall("copy_sent", text)),
            "in_the_clear": len(re.findall("copies_in_the_clear", text)),
            "verdict": verdict,
        }


if __name__ == "__main__":
    print(json.dumps(play(Path(sys.argv[1]))))
