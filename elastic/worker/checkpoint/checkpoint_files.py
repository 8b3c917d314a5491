"""The files of an automatic checkpoint: tensors in parts, the manifest, and what torch needs.

    part-00000.distcp     rank 0's share of the tensors, each piece as torch.save writes it
    part-00000.json       which pieces lie where in it
    values.distcp         everything that is no tensor, one value after the other, for stock PyTorch
    state.pt              the same as one nested value, for us
    manifest.json         all pieces of all parts, and where in the run this is
    .metadata             the manifest as torch.distributed.checkpoint expects it: a pickle

`torch.distributed.checkpoint.load(..., checkpoint_id=PATH)` and its `dcp_to_torch_save` read such
a directory as one of their own: {"model": ..., "optimizer": ..., "scheduler": ...}.

Rule: what we load ourselves never goes through `.metadata`; torch's own readers unpickle it.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.serialization import config as serialization

from elastic.core.policy.shares import RowRange, TensorRows
from elastic.errors import StorageError
from elastic.storage.files import Files, OutputFile
from elastic.storage.marker import StoredFile
from elastic.worker.state.arena import SnapshotSlot, StateLayout
from elastic.worker.state.packing import TensorSpec, bytes_of

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SKELETON = "state.pt"
VALUES = "values.distcp"
STOCK = ".metadata"
FAILED = ".failed"
"""Ends the name of what a rank leaves in place of its part's note if it cannot write it."""
FORMAT = 1
BUFFER_SUFFIX = " (buffer)"
EXTRA = "_extra_state"
MODULE = "module."
SCRATCH_BYTES = 1 << 16


class TensorPiece(NamedTuple):
    """Where one piece lies.

    Attributes:
        tensor, first, rows: the piece; see `TensorRows`.
        offset, length: bytes in its file.
        data: where in the file its elements begin, one after the other; -1 if that is not known.
    """

    tensor: int
    first: int
    rows: int
    offset: int
    length: int
    data: int


@dataclass(frozen=True)
class PartFile:
    """What one rank has written.

    Attributes:
        items: in the order in which they lie there; end to end.
        tensors: fingerprint of the tensors of the state, as this rank has them.
        prints: checksums of what must be alike on all ranks, by name; see `replica_checksums`.
    """

    file: StoredFile
    items: tuple[TensorPiece, ...]
    tensors: int = 0
    prints: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> PartFile:
        """Take a part out of a note, or of the manifest; ValueError if it is none."""
        try:
            items = tuple(TensorPiece(*one) for one in fields["items"])
            tensors, prints = fields.get("tensors", 0), dict(fields.get("prints", {}))
            return PartFile(StoredFile(*fields["file"]), items, tensors, prints)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a part: {error!r}") from None


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        steps: committed in the run.
        world_size: of the group that wrote it.
        versions: of what wrote it, by name.
        specs: of the tensors, by number.
        parts: by rank.
    """

    epoch: int
    step: int
    steps: int
    world_size: int
    versions: Mapping[str, str]
    specs: tuple[TensorSpec, ...]
    parts: tuple[PartFile, ...]

    def to_json(self) -> bytes:
        fields = {**vars(self), "specs": [list(asdict(spec).values()) for spec in self.specs]}
        fields["parts"] = [vars(one) for one in self.parts]
        return json.dumps({"format": FORMAT, **fields}).encode()

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Read the text of the file; ValueError if it is none, or of another format."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"manifest: expected an object with format {FORMAT}")
        try:
            specs = [TensorSpec(n, t, tuple(s), a) for n, t, s, a in fields.pop("specs")]
            parts = [PartFile.of(one) for one in fields.pop("parts")]
            return Manifest(**fields, specs=tuple(specs), parts=tuple(parts))
        except (KeyError, TypeError) as error:
            raise ValueError(f"manifest: {error!r}") from None


def part_name(rank: int) -> str:
    """Return the name of a rank's part, without its ending."""
    return f"part-{rank:05d}"


# -------------------------------------------------------------------------------------- writing


def write_part(
    files: Files,
    rank: int,
    slot: SnapshotSlot,
    layout: StateLayout,
    pieces: Sequence[TensorRows],
    moves: Callable[[int], None] = lambda num_bytes: None,
) -> PartFile:
    """Write a rank's share of a snapshot; it counts only once its note is written.

    `moves` is called before each piece, with its size; StorageError if it cannot be written.
    """
    items: list[TensorPiece] = []

    def produce(output: OutputFile) -> None:
        items.clear()  # It is begun anew when storage has failed in the middle.
        for piece in pieces:
            offset, chunk = output.size, slot.chunk(layout, piece)
            finder = _Finder(output, chunk)
            moves(chunk.nbytes)
            # torch's own checksum takes seven times as long as all else, and is never read.
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                torch.save(chunk, finder)  # type: ignore[arg-type]
            place = (offset, output.size - offset, finder.at)
            items.append(TensorPiece(piece.tensor, piece.first, piece.rows, *place))

    written = files.put(f"{part_name(rank)}.distcp", produce)
    return PartFile(written, tuple(items))


def write_note(files: Files, rank: int, part: PartFile) -> None:
    """Write the note that a rank's share is complete; StorageError if it cannot be written."""
    files.write(f"{part_name(rank)}.json", json.dumps(vars(part)).encode())


def write_failure(files: Files, rank: int, reason: str, *, is_refused: bool) -> None:
    """Write the note that a rank's share has failed; StorageError if it cannot be written."""
    text = json.dumps({"reason": reason, "is_refused": is_refused})
    files.write(f"{part_name(rank)}{FAILED}", text.encode())


class _Finder:
    """Passes on what torch.save writes, and notes where a tensor's elements go.

    Attributes:
        at: their offset in the output, -1 while they have not come.
    """

    def __init__(self, output: OutputFile, chunk: torch.Tensor) -> None:
        """Remember this tensor's memory, to recognise it later."""
        self.at = -1
        self._output = output
        self._address, self._size = chunk.data_ptr(), chunk.nbytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        is_whole = len(view) == self._size > 0
        if is_whole and np.frombuffer(view, np.uint8).ctypes.data == self._address:
            self.at = self._output.size
        return self._output.write(view)

    def flush(self) -> None:
        """Nothing: the output is made durable as a whole."""


def read_parts(files: Files, world_size: int) -> tuple[list[PartFile], list[StoredFile]] | None:
    """Return the parts of all ranks and the names of their notes; None while one is missing.

    Raises:
        StorageError: storage cannot be read, or has refused a rank's part.
        ValueError: a note is damaged, or a rank has given its part up.
    """
    wanted = [f"{part_name(rank)}.json" for rank in range(world_size)]
    found = set(files.list("part-*"))
    for rank in range(world_size):
        failed = f"{part_name(rank)}{FAILED}"
        if failed in found:
            note = json.loads(files.read(failed))
            text = f"rank {rank} could not write its part: {note['reason']}"
            raise StorageError(text) if note["is_refused"] else ValueError(text)
    if not set(wanted) <= found:
        return None
    notes = [files.read(name) for name in wanted]
    stored = [StoredFile.of(name, note) for name, note in zip(wanted, notes, strict=True)]
    return [PartFile.of(json.loads(note)) for note in notes], stored


def write_shared_files(
    files: Files,
    manifest: Manifest,
    skeleton: bytes,
    state: Mapping[str, Any],
    aliases: Sequence[Mapping[str, str]],
) -> list[StoredFile]:
    """Write everything but the parts and their notes; StorageError if that fails.

    `aliases` has, for each model, other names of tensors: those of shared parameters. Tensors of
    the state are distinguished by where they are.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    stored = [files.write(MANIFEST, manifest.to_json()), files.write(SKELETON, skeleton)]
    try:
        flat, paths = flatten_state_dict(stock_state(state, aliases))
    except ValueError as error:
        log.warning("stock_metadata_left_out path=%s reason=%r", files.path, str(error))
    else:
        stored += _write_stock(files, manifest, flat, paths)
    return stored


def stock_state(state: Mapping[str, Any], aliases: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the objects of a run under the names that people give them.

    The first model is "model", the next one "model_1"; so with optimizers and all else. Names of
    parameters are those of the user's own module.
    """
    found: dict[str, Any] = {}
    for number, tensors in enumerate(state["models"]):
        plain = {_plain_name(name): tensor for name, tensor in tensors.items()}
        extra = {f"{path}.{EXTRA}".lstrip("."): one for path, one in state["extra"][number].items()}
        plain |= {_plain_name(name): one for name, one in extra.items()}
        known = aliases[number] if number < len(aliases) else {}
        plain |= {_plain_name(alias): plain[_plain_name(name)] for alias, name in known.items()}
        found[_numbered("model", number)] = plain
    for kind in ("optimizers", "schedulers", "scalers"):
        for number, one in enumerate(state[kind]):
            found[_numbered(kind.removesuffix("s"), number)] = one
    for name, one in state["registered"].items():
        found[f"registered.{name}"] = one
    if state["loose"]:
        found["loose"] = dict(enumerate(state["loose"]))
    return found


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


def _plain_name(name: str) -> str:
    return name.removesuffix(BUFFER_SUFFIX).removeprefix(MODULE)


def _write_stock(
    files: Files, manifest: Manifest, flat: Mapping[str, Any], paths: Mapping[str, Any]
) -> list[StoredFile]:
    """Write what stock PyTorch needs beside the parts."""
    # Long to import, and not needed by a driver; a spare has done so.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    values = io.BytesIO()
    for key, value in flat.items():
        number = getattr(value, "elastic_number", None)
        if number is None:
            offset = values.tell()
            torch.save(value, values)
            entries[key] = BytesStorageMetadata()
            length = values.tell() - offset
            places[MetadataIndex(key)] = _StorageInfo(VALUES, offset, length)
    pieces: dict[int, list[tuple[TensorPiece, str]]] = {}
    for part in manifest.parts:
        for item in part.items:
            pieces.setdefault(item.tensor, []).append((item, part.file.path))
    for key, value in flat.items():
        number = getattr(value, "elastic_number", None)
        if number is None:
            continue
        spec, chunks = manifest.specs[number], []
        for item, path in pieces[number]:
            first = torch.Size([item.first, *[0] * (len(spec.shape) - 1)][: len(spec.shape)])
            sizes = torch.Size((item.rows, *spec.shape[1:]) if spec.shape else ())
            chunks.append(ChunkStorageMetadata(first, sizes))
            places[MetadataIndex(key, first)] = _StorageInfo(path, item.offset, item.length)
        kind = TensorProperties(dtype=getattr(torch, spec.dtype))
        entries[key] = TensorStorageMetadata(kind, torch.Size(spec.shape), chunks)
    metadata = Metadata(entries, dict(paths), places)
    return [files.write(VALUES, values.getvalue()), files.write(STOCK, pickle.dumps(metadata))]


# -------------------------------------------------------------------------------------- reading


def read_tensors(
    files: Files, manifest: Manifest, wanted: Mapping[int, RowRange] | None
) -> list[torch.Tensor]:
    """Return all tensors of a checkpoint, by number, after every byte that was read was checked.

    Of some tensors, by number, only the rows that are `wanted` are read: memory is taken for those
    alone, and a part that has none of them is not read. StorageError if a file cannot be read;
    ValueError, by name, if it is not what was written, or parts are missing.
    """
    wanted = wanted or {}
    tensors = [_empty(spec, wanted.get(spec.number)) for spec in manifest.specs]
    missing = {spec.number: max([1, *spec.shape[:1]]) for spec in manifest.specs}
    for part in manifest.parts:
        for item in part.items:
            missing[item.tensor] -= max(item.rows, 1)
        if not any(_overlap(item, wanted).rows or item.tensor not in wanted for item in part.items):
            continue
        with files.reading(part.file.path) as file:
            source = _Source(file, part.file)
            for item in part.items:
                _read_item(source, item, tensors[item.tensor], wanted.get(item.tensor))
            source.finish()
    left = [number for number, rows in missing.items() if rows > 0]
    if left:
        raise ValueError(f"{MANIFEST}: pieces of tensors {left[:5]} are missing")
    return tensors


def _empty(spec: TensorSpec, rows: RowRange | None) -> torch.Tensor:
    shape = spec.shape if rows is None else (rows.rows, *spec.shape[1:])
    return torch.empty(shape, dtype=getattr(torch, spec.dtype))


def _overlap(item: TensorPiece, wanted: Mapping[int, RowRange]) -> RowRange:
    rows = RowRange(item.first, item.rows)
    return wanted[item.tensor].with_both(rows) if item.tensor in wanted else rows


def _read_item(
    source: _Source, item: TensorPiece, tensor: torch.Tensor, rows: RowRange | None
) -> None:
    """Read what is wanted of a piece to where it belongs; directly, if we know where it is."""
    whole = RowRange(item.first, item.rows)
    both = whole if rows is None else rows.with_both(whole)
    target = tensor
    if target.dim():
        target = target[both.first - (rows.first if rows else 0) :][: both.rows]
    if item.data >= 0:
        size = target.nbytes // max(1, both.rows)
        before = (both.first - item.first) * size
        source.skip(item.data + before - source.size)
        source.read_into(memoryview(bytes_of(target).numpy()))  # type: ignore[arg-type]
        source.skip(item.offset + item.length - source.size)
        return
    blob = bytearray(item.length)
    source.read_into(memoryview(blob))
    chunk = torch.load(io.BytesIO(blob), weights_only=True)
    if (
        chunk.dtype != target.dtype
        or chunk.shape[1:] != tensor.shape[1:]
        or (chunk.dim() and chunk.shape[0] != item.rows)
    ):
        raise ValueError(f"{MANIFEST}: tensor {item.tensor} is {tuple(chunk.shape)} in its part")
    target.copy_(chunk[both.first - item.first :][: both.rows] if chunk.dim() else chunk)


class _Source:
    """A file that is read from its beginning to its end, and checked on the way.

    Attributes:
        size: bytes that were read.
    """

    def __init__(self, file: Any, expected: StoredFile) -> None:
        self.size = 0
        self._file, self._expected = file, expected
        self._crc32 = 0
        self._scratch = bytearray(SCRATCH_BYTES)

    def read_into(self, memory: memoryview) -> None:
        """Fill memory; ValueError if the file ends before."""
        done = 0
        while done < len(memory):
            count = self._file.readinto(memory[done:])
            if not count:
                size = self.size + done
                raise ValueError(
                    f"{self._expected.path} has {size} bytes instead of {self._expected.size}"
                )
            done += count
        self._crc32 = zlib.crc32(memory, self._crc32)
        self.size += done

    def skip(self, count: int) -> None:
        """Read unused bytes, for their checksum."""
        while count > 0:
            part = min(count, len(self._scratch))
            self.read_into(memoryview(self._scratch)[:part])
            count -= part

    def finish(self) -> None:
        """Raise a ValueError with the difference if the file is not what was written."""
        more = self._file.read(1)
        self._expected.compare(self.size + len(more), self._crc32)


def read_checked(files: Files, stored: StoredFile) -> bytes:
    """Return the content of a file; ValueError if it is not what was written."""
    content = files.read(stored.path, stored.size + 1)
    stored.check(content)
    return content
