"""What idle agents cost a coordinator: CPU and memory with N agents connected and nothing to do.

    python bench/idle_agents.py --agents 200 --seconds 20

Each agent is a connection and a stream of its own, opened with the options that real agents use,
keepalive pings included; it says Hello once and is then silent, as an agent without workers is.
Exits with 1 if the coordinator needs more than --max-percent of one core.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import click
import psutil

from elastic.core.messages import Hello, Welcome
from elastic.core.world import Node, NodeId
from elastic.runtime.rpc import call_metadata, open_channel
from elastic.wire.codec_stream import (
    ATTACH_METHOD,
    decode_coordinator_message,
    encode_agent_message,
)

AGENTS_PER_PROCESS = 100
START_TIMEOUT_S = 30.0


async def hold_agents(address: str, first: int, number: int) -> None:
    """Connect agents, say so on stdout, and hold the streams until stdin closes."""
    async with AsyncExitStack() as stack:
        calls = []
        for index in range(first, first + number):
            channel = await stack.enter_async_context(open_channel(address))
            call = channel.stream_stream(ATTACH_METHOD)(metadata=call_metadata())
            calls.append(call)
            node = Node(NodeId(f"idle-{index}"), 1, "127.0.0.1", 0)
            await call.write(encode_agent_message(Hello(node)))
        for call in calls:
            data = await call.read()
            if not isinstance(decode_coordinator_message(data), Welcome):
                raise click.ClickException(f"not welcome: {decode_coordinator_message(data)}")
        print("connected", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        broken = sum(call.done() for call in calls)
        print(f"broken={broken}", flush=True)
        for call in calls:
            call.cancel()


def start_coordinator(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a coordinator with a store of its own; return it and its address."""
    ready = folder / "ready"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "elastic.coord.cli", "serve", "--listen", "127.0.0.1:0"),
            *("--store", f"sqlite:{folder}/coord.sqlite", "--ready-file", str(ready)),
            *("--log-level", "warning"),
        ],
        stdout=subprocess.DEVNULL,
    )
    until = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise click.ClickException("the coordinator did not start")
        time.sleep(0.02)
    words = dict(word.partition("=")[::2] for word in ready.read_text().split())
    return process, words["address"]


def measure(process: psutil.Process, seconds: float) -> tuple[float, float, int]:
    """Return percent of one core, resident MiB and threads over a time."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = process.cpu_times(), time.monotonic() - began
    busy = (after.user - before.user) + (after.system - before.system)
    return 100 * busy / elapsed, process.memory_info().rss / 2**20, process.num_threads()


@click.command()
@click.option("--agents", default=200, show_default=True)
@click.option("--seconds", default=20.0, show_default=True)
@click.option("--max-percent", default=5.0, show_default=True)
@click.option("--hold", nargs=3, type=str, hidden=True)
def main(
    agents: int, seconds: float, max_percent: float, hold: tuple[str, str, str] | None
) -> None:
    """Measure a coordinator with idle agents."""
    if hold:
        asyncio.run(hold_agents(hold[0], int(hold[1]), int(hold[2])))
        return
    holders: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        coordinator, address = start_coordinator(Path(folder))
        try:
            process = psutil.Process(coordinator.pid)
            empty = measure(process, min(seconds, 5.0))
            began = time.monotonic()
            for first in range(0, agents, AGENTS_PER_PROCESS):
                number = min(AGENTS_PER_PROCESS, agents - first)
                command = [sys.executable, __file__, "--hold", address, str(first), str(number)]
                holders.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            for holder in holders:
                if holder.stdout is None or holder.stdout.readline() != "connected\n":
                    raise click.ClickException("agents did not connect")
            took = time.monotonic() - began
            full = measure(process, seconds)
            said = [holder.communicate()[0].strip() for holder in holders]
        finally:
            for child in [*holders, coordinator]:
                child.kill()
                child.wait()
    print(f"agents            {agents}, all welcome after {took:.1f} s, {' '.join(said)}")
    print(f"coordinator alone {empty[0]:.2f} % of a core, {empty[1]:.0f} MiB")
    print(f"with agents       {full[0]:.2f} % of a core, {full[1]:.0f} MiB, {full[2]} threads")
    print(f"per agent         {(full[1] - empty[1]) * 1024 / agents:.0f} KiB")
    sys.exit(full[0] > max_percent)


if __name__ == "__main__":
    main()
