"""WebDataset: tar files with the members of a sample, such as "7.jpg" and "7.cls", side by side.

Rule: samples are read in the order of the files, as bytes; they are decoded when rows are read.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import numpy as np

from elastic.data.batches import Batch, arrow
from elastic.data.files import DataError, File, Reader
from elastic.data.sources import FileSource
from elastic.errors import UsageError

SAMPLES, SAMPLES_BYTES = 1024, 16 * 1024**2
"""A batch has at most so many samples, or about so many bytes."""
IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "bmp", "webp")
NAME = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]*)$")
Chosen = Callable[[str], bool] | Sequence[str] | None
"""A function of a name, patterns and names, or None for all."""


@dataclass
class Tar(FileSource):
    """Tar files of samples: "__key__", and a column for each ending, in the order of the first.

    Attributes:
        fileselect: of the members' names.
        filerename: functions that return another name, in order.
        suffixes: of their endings; a list without patterns names the columns.
    """

    fileselect: Chosen = None
    filerename: Sequence[Callable[[str], str]] = ()
    suffixes: Chosen = None

    def __post_init__(self) -> None:
        """Start without columns, unless they are named."""
        super().__post_init__()
        self._columns: list[str] | None = None
        if isinstance(self.suffixes, Sequence) and not any(set(s) & {*"*?"} for s in self.suffixes):
            self._columns = [one.lstrip(".") for one in self.suffixes]

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        held: list[dict[str, Any]] = []
        size = 0
        for sample in self._samples(reader, file):
            held.append(sample)
            size += sum(map(len, sample.values()))
            if len(held) == SAMPLES or size >= SAMPLES_BYTES:
                yield self._batch(held, file)
                held, size = [], 0
        if held:
            yield self._batch(held, file)

    def _samples(self, reader: Reader, file: File) -> Iterator[dict[str, Any]]:
        """Yield the samples of a file: "__key__", and contents by ending."""
        sample: dict[str, Any] = {}
        seen: set[str] = set()
        for name, content in self._members(reader, file):
            found = NAME.match(name)
            if found is None:
                continue
            key, ending = found.groups()
            if key != sample.get("__key__"):
                if len(sample) > 1:
                    yield sample
                if key in seen:
                    raise DataError(
                        f"elastic.data: {file.path}: the members of {key!r} are not adjacent: "
                        f"write the file with its members in order (tar --sort=name)"
                    )
                seen.add(key)
                sample = {"__key__": key}
            if not _is_chosen(ending, self.suffixes):
                continue
            if ending in sample:
                raise DataError(f"elastic.data: {file.path}: there is a second {name!r}")
            sample[ending] = content
        if len(sample) > 1:
            yield sample

    def _members(self, reader: Reader, file: File) -> Iterator[tuple[str, bytes]]:
        try:
            with (
                reader.open(file, self.compression) as opened,
                tarfile.open(fileobj=opened, mode="r|*") as stream,
            ):
                for member in stream:
                    name = member.name
                    for rename in self.filerename:
                        name = rename(name)
                    held = stream.extractfile(member) if _is_chosen(name, self.fileselect) else None
                    if held is not None:  # Neither a folder nor a link.
                        yield name, held.read()
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"elastic.data: {file.path} is no tar file: {error}") from error

    def _batch(self, samples: Sequence[Mapping[str, Any]], file: File) -> Batch:
        pa = arrow()
        if self._columns is None:
            self._columns = [name for name in samples[0] if name != "__key__"]
        for sample in samples:
            more = sample.keys() - {"__key__", *self._columns}
            if more:
                raise DataError(
                    f"elastic.data: {file.path}: sample {sample['__key__']!r} has {min(more)!r}, "
                    f"and the first one has {self._columns}: name the columns that you want "
                    f"(suffixes=[...]); samples without one have None there"
                )
        columns = {"__key__": pa.array([one["__key__"] for one in samples], pa.string())}
        for name in self._columns:
            columns[name] = pa.array([one.get(name) for one in samples], pa.binary())
        return pa.table(columns)


def _is_chosen(name: str, chosen: Chosen) -> bool:
    if chosen is None or callable(chosen):
        return chosen is None or chosen(name)
    return any(
        fnmatch.fnmatch("." + name, one) or one in (name, "." + name) or fnmatch.fnmatch(name, one)
        for one in chosen
    )


Coder = Callable[[dict[str, Any]], dict[str, Any]]


def coders_of(given: Any, default: Callable[..., dict[str, Any]]) -> list[Coder]:
    """Return the functions that `decoder=` or `encoder=` names.

    Args:
        given: True for the default, None or False for none, the name of a form, such as "PIL", a
            function of a sample, or several of these.
        default: takes a sample, and `form`.

    Raises:
        UsageError: it is none of these.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    found: list[Coder] = []
    for one in several:
        if isinstance(one, (bool, str)) or one is None:
            found += [update_wrapper(partial(default, form=one), default)] if one else []
        elif callable(one):
            found.append(one)
        else:
            raise UsageError(f"webdataset: got {one!r}: expected True, None, 'PIL' or a function")
    return found


def decoded(sample: Mapping[str, Any], form: Any = True) -> dict[str, Any]:
    """Return a sample with values by the endings of their columns: text, numbers, arrays, images.

    Those of other endings stay bytes. The form "PIL" is for images of Pillow; arrays otherwise.
    UsageError if a member is a pickle, which runs code.
    """
    found = dict(sample)
    for name, content in sample.items():
        ending = name.rpartition(".")[2].lower()
        if content is None or name.startswith("__") or not isinstance(content, bytes):
            continue
        if ending in ("txt", "text"):
            found[name] = content.decode()
        elif ending in ("cls", "cls2"):
            found[name] = int(content)
        elif ending == "json":
            found[name] = json.loads(content)
        elif ending == "npy":
            found[name] = np.load(io.BytesIO(content), allow_pickle=False)
        elif ending in IMAGES:
            found[name] = _image_of(content, form)
        elif ending in ("pt", "pth"):
            import torch

            found[name] = torch.load(io.BytesIO(content), weights_only=True)
        elif ending in ("pickle", "pkl"):
            raise UsageError(
                f"read_webdataset: column {name!r} holds pickles, and to load one runs its code: "
                f"leave it out (suffixes=[...]), or pass decoder=, a function that loads it"
            )
    return found


def _image_of(content: bytes, form: Any) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as opened:
        opened.load()
        return opened if form == "PIL" else np.asarray(opened)


def encoded(sample: Mapping[str, Any], form: Any = True) -> dict[str, Any]:
    """Return a sample with the bytes of its values; the reverse of `decoded`."""
    del form
    found = dict(sample)
    for name, value in sample.items():
        ending = name.rpartition(".")[2].lower()
        if value is None or name.startswith("__") or isinstance(value, bytes):
            continue
        held = io.BytesIO()
        if ending == "json":
            held.write(json.dumps(value, default=np.ndarray.tolist).encode())
        elif ending == "npy":
            np.save(held, value)
        elif ending in IMAGES:
            from PIL import Image

            image = Image.fromarray(value) if isinstance(value, np.ndarray) else value
            image.save(held, format={"jpg": "jpeg"}.get(ending, ending))
        elif ending in ("pt", "pth"):
            import torch

            torch.save(torch.as_tensor(value) if isinstance(value, np.ndarray) else value, held)
        else:
            held.write(str(value).encode())
        found[name] = held.getvalue()
    return found


def write_tar(output: Any, rows: Iterable[Mapping[str, Any]], encoders: Sequence[Coder]) -> None:
    """Write rows as samples; those without "__key__" are named by their numbers.

    UsageError if a value is no bytes after the encoders.
    """
    with tarfile.open(fileobj=output, mode="w|") as stream:
        for number, row in enumerate(rows):
            sample = dict(row)
            for encode in encoders:
                sample = encode(sample)
            key = sample.get("__key__", f"{number:09d}")
            for name, content in sample.items():
                if content is None or name.startswith("__"):
                    continue
                if not isinstance(content, bytes):
                    raise UsageError(
                        f"write_webdataset: column {name!r} holds {type(content).__name__} values: "
                        f"expected bytes, or encoder=True or a function that makes them"
                    )
                about = tarfile.TarInfo(f"{key}.{name}")
                about.size = len(content)
                stream.addfile(about, io.BytesIO(content))
