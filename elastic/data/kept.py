"""The record of a run's datasets in its directory.

Rule: RUN/data/<name>.json lists the files of a dataset with their sizes and stamps, and counts what
was skipped; rows without random access are stored beside it, as parquet files. A resumed run gets
the same rows, or an error.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Sequence
from typing import Any

from elastic.data.batches import arrow, to_table
from elastic.data.files import DataError, File, check_unchanged
from elastic.data.nodes import Node, Read, skipped_of, table_of, write_part
from elastic.data.parquet import Parquet
from elastic.data.sources import Block, Memory, Source
from elastic.data.table import Part, Table
from elastic.data.writing import Sink
from elastic.errors import UsageError
from elastic.storage.files import Files

log = logging.getLogger(__name__)

FOLDER = "data"
"""Name of the folder in the run directory."""


def table_of_run(node: Node, name: str, run: Files, *, writes: bool) -> Table | None:
    """Return the table that a run trains with, recorded at the first start of the run.

    Args:
        node: the dataset as given now.
        name: of the dataset, in the run.
        run: the run directory.
        writes: False to return None if there is no record yet.

    Raises:
        DataError: the run was started with other files.
        StorageError: the run directory cannot be read or written.
    """
    path = f"{FOLDER}/{name}.json"
    sources = _sources_of(node)
    if run.exists(path):
        saved = json.loads(run.read(path))
        check_unchanged(_files(saved["sources"]), sources, name)
        kept = iter(saved["kept"])
        nothing = {"files": [], "blocks": [], "types": ""}
        table = table_of(node, lambda _: _kept_part(next(kept, nothing)), travels=True)
        if [len(part.blocks) for part in table.parts] != saved["blocks"]:
            raise DataError(
                f"dataset {name!r}: the run has begun with another dataset: parts of "
                f"{saved['blocks']} blocks, and now {[len(p.blocks) for p in table.parts]}; begin "
                f"a new run under another name"
            )
        for (_, skipped), counts in zip(skipped_of(node), saved.get("skipped", ()), strict=False):
            skipped.most.update(counts)
        return table
    if not writes:
        return None
    kept_parts: list[Part] = []

    def keep(part_of: Node) -> Part:
        folder = f"{FOLDER}/{name}-{len(kept_parts)}"
        log.info("data_written to %s/%s", run.path, folder)
        kept_parts.append(write_part(part_of.stream(), run, folder))
        return kept_parts[-1]

    table = table_of(node, keep, travels=True)
    if not table.rows:
        raise UsageError(f"dataset {name!r} has no rows; expected at least 1 to train with")
    saved = {
        "version": 1,
        "rows": table.rows,
        "sources": [[file.path, file.size, file.stamp] for file in sources],
        "kept": [
            {
                "files": [[file.path, file.size, file.stamp] for file in part.files],
                "blocks": [[b.file, b.group, b.start, b.stop, b.size] for b in part.blocks],
                "types": _types_text(part.source),
            }
            for part in kept_parts
        ],
        "blocks": [len(part.blocks) for part in table.parts],
        "skipped": [skipped.most for _, skipped in skipped_of(node)],
    }
    run.write(path, json.dumps(saved).encode())
    return table


def _files(rows: Sequence[Sequence[Any]]) -> tuple[File, ...]:
    return tuple(File(*row) for row in rows)


def _kept_part(saved: dict[str, Any]) -> Part:
    pa, blocks = arrow(), tuple(Block(*row) for row in saved["blocks"])
    held = base64.b64decode(saved["types"])
    types = {one.name: one.type for one in (pa.ipc.read_schema(pa.py_buffer(held)) if held else ())}
    return Part(Parquet("rows kept with the run", types=types), _files(saved["files"]), blocks)


def _types_text(source: Source) -> str:
    """Return the types of the columns of kept rows, for `_kept_part`."""
    types = source.types if isinstance(source, Parquet) else {}
    return base64.b64encode(arrow().schema(types).serialize()).decode()


def _sources_of(node: Node) -> tuple[File, ...]:
    """Return all source files of a dataset; rows in memory are a file with a checksum."""
    if isinstance(node, Read):
        if isinstance(node.source, Memory):
            return (_file_of(node.source),)
        return node.source.listing().files
    return tuple(file for parent in node.parents for file in _sources_of(parent))


def _file_of(source: Memory) -> File:
    """Return a file entry for rows in memory: size and checksum of their Arrow stream."""
    pa, total = arrow(), Sink()
    for batch in source.batches:
        table = to_table(batch)
        with pa.ipc.new_stream(pa.PythonFile(total, mode="w"), table.schema) as stream:
            stream.write_table(table)
    return File(source.name, total.size, f"{total.crc32:08x}")
