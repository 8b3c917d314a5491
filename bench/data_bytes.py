"""Bytes of a table that a run fetches, counted by the S3 server that has it.

    python bench/data_bytes.py --workers 1 --workers 2 --workers 4 --workers 8

An epoch of a run of W workers over a shuffled parquet table must fetch it once, whatever W is. A
run that goes on at 90 % of an epoch of a table ten times as large must fetch two windows of the
shuffle for each lane and no more: the present one and the next. The server is a process of its own
that serves files, the large table's keys several for each file; it counts what it sends of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from elastic import data, init, train
from elastic.train.torch import TorchTrainer, prepare_model, prepare_optimizer

ROW_FLOATS, GROUP_ROWS, GROUPS = 1024, 1024, 16
"""A row has 4 KB, a row group 4 MB, a file 64 MB."""
LARGER = 10
MICRO_BATCH, MICRO_BATCHES = 64, 8


# -------------------------------------------------------------------------------- the server


class Bucket(BaseHTTPRequestHandler):
    """Serves s3://bucket/TABLE/N.parquet from the files of a folder."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[list[Path]] = []
    tables: ClassVar[dict[str, int]] = {}
    sent = 0

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Describe an object."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send an object or a part of it, the list of a folder, or what was sent so far."""
        url = urlparse(self.path)
        if url.path == "/sent":
            text = str(Bucket.sent).encode()
            self._answer(200, {"Content-Type": "text/plain"}, text)
        elif "list-type" in url.query:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            self._answer(200, {"Content-Type": "application/xml"}, self._list(prefix))
        else:
            self._object(url.path.removeprefix("/bucket/"))

    def _object(self, key: str) -> None:
        table, _, name = key.partition("/")
        number = name.removesuffix(".parquet")
        if not number.isdecimal() or int(number) >= self.tables.get(table, 0):
            self._answer(
                404, {"Content-Type": "application/xml"}, b"<Error><Code>NoSuchKey</Code></Error>"
            )
            return
        path = self._file(int(number))
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        last = min(int(found[2]), size - 1) if found and found[2] else size - 1
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first)
        headers = {"ETag": f'"{key}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if found:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        if self.command == "GET":
            Bucket.sent += len(body)
        self._answer(206 if found else 200, headers, body)

    def _file(self, number: int) -> Path:
        return self.files[number % len(self.files)]

    def _list(self, prefix: str) -> bytes:
        keys = [
            f"<Contents><Key>{key}</Key><Size>{self._file(number).stat().st_size}</Size>"
            f"<ETag>&quot;{key}&quot;</ETag><StorageClass>STANDARD</StorageClass>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for table, count in self.tables.items()
            for number, key in ((n, f"{table}/{n:04}.parquet") for n in range(count))
            if key.startswith(prefix)
        ]
        return (
            f"<ListBucketResult><Name>bucket</Name><Prefix>{prefix}</Prefix><KeyCount>{len(keys)}"
            f"</KeyCount><IsTruncated>false</IsTruncated>{''.join(keys)}</ListBucketResult>"
        ).encode()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # The reader has been closed.
                self.wfile.write(body)


def serve(folder: str, files: int) -> None:
    """Serve until stdin ends."""
    Bucket.files = sorted(Path(folder).iterdir())
    Bucket.tables = {"small": files, "large": LARGER * files}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def bucket(folder: Path, files: int) -> Iterator[str]:
    """Run a server of these files; gives its address."""
    command = [sys.executable, __file__, "--serve", str(folder), "--files", str(files)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


# -------------------------------------------------------------------------------- the runs


def write_files(folder: Path, files: int) -> int:
    """Write files that cannot be compressed; return the bytes of one."""
    generator = np.random.default_rng(0)
    for number in range(files):
        values = generator.random(GROUPS * GROUP_ROWS * ROW_FLOATS, dtype=np.float32)
        rows = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, ROW_FLOATS)})
        path = folder / f"{number:04}.parquet"
        pq.write_table(
            rows, path, row_group_size=GROUP_ROWS, compression=None, use_dictionary=False
        )
    return path.stat().st_size


def one_epoch(_config: dict[str, Any]) -> None:
    """Train with each row once."""
    model = prepare_model(torch.nn.Linear(ROW_FLOATS, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    sizes = {"batch_size": MICRO_BATCH, "global_batch_size": MICRO_BATCH * MICRO_BATCHES}
    for _ in train.epochs(1):
        for batch in train.get_dataset_shard("train").iter_torch_batches(**sizes):
            model(batch["x"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def goes_on(config: dict[str, Any]) -> None:
    """Go on at 90 % of an epoch, for one batch of each rank."""
    shard, rows = train.get_dataset_shard("train"), config["rows"]
    shard.load_state_dict({"epoch": 0, "left": [[rows * 9 // 10, rows]]})
    next(iter(shard.iter_batches(batch_size=MICRO_BATCH)))


def measure(address: str, table: str, workers: int, function: Any, config: dict[str, Any]) -> int:
    """Return the bytes that the server sent for a run."""
    before = int(urllib.request.urlopen(f"{address}/sent").read())
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            function,
            train_loop_config=config,
            datasets={"train": data.read_parquet(f"s3://bucket/{table}").random_shuffle(seed=1)},
            dataset_config=train.DataConfig(shuffle_memory=config["memory"]),
            scaling_config=train.ScalingConfig(num_workers=workers),
            run_config=train.RunConfig(storage_path=storage, verbose=0),
        ).fit()
    return int(urllib.request.urlopen(f"{address}/sent").read()) - before


@click.command()
@click.option("--workers", type=int, multiple=True, help="Default: 1, 2, 4, 8.")
@click.option("--files", default=16, show_default=True, help="Of 64 MB, in the smaller table.")
@click.option("--memory", default=512, show_default=True, help="MB of each worker's shuffle.")
@click.option("--serve", "served", hidden=True)
def main(workers: tuple[int, ...], files: int, memory: int, served: str | None) -> None:
    """Count the bytes that runs fetch."""
    if served:
        serve(served, files)
        return
    counts = workers or (1, 2, 4, 8)
    folder = Path(tempfile.mkdtemp(prefix="bench-data-bytes-"))
    try:
        size = files * write_files(folder, files)
        rows = LARGER * files * GROUPS * GROUP_ROWS
        shown = Table("workers", "an epoch, x the table", "at 90 %, MB", "two windows a lane, MB")
        with bucket(folder, files) as address:
            os.environ |= {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "eu-west-1",
            }
            init(num_cpus=max(counts))
            config = {"memory": memory * 2**20, "rows": rows}
            for number in counts:
                epoch = measure(address, "small", number, one_epoch, config)
                resumed = measure(address, "large", number, goes_on, config)
                shown.add_row(
                    f"{number}",
                    f"{epoch / size:.3f}",
                    f"{resumed / 2**20:.0f}",
                    f"{number * memory}",
                )
        title = f"{size / 2**30:.1f} GB, and {LARGER * size / 2**30:.1f} GB for 90 %"
        Console().print(f"{title}; {json.dumps(config)}", shown)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
