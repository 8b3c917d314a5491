"""Ray's base class of what names the files that a dataset is written to."""

from __future__ import annotations

import os
from typing import Any


class FilenameProvider:
    """Names files for `Dataset.write_...(filename_provider=...)`: override one of its methods.

        class Labelled(FilenameProvider):
            def get_filename_for_row(self, row, write_uuid, task_index, block_index, row_index):
                return f"{row['label']}_{write_uuid}_{row_index:06}.png"

    Each file is the one block of a task of its own here; each image is a row of the first task.
    """

    def __init__(self, dataset_uuid: str | None = None, file_format: str | None = None) -> None:
        """Set what the default names begin and end with."""
        self.dataset_uuid, self.file_format = dataset_uuid, file_format

    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        """Return a name.

        Args:
            write_uuid: another one for each call of `write_...`.
            task_index: the number of the file.
        """
        begin = "" if self.dataset_uuid is None else f"{self.dataset_uuid}_"
        end = "" if self.file_format is None else f".{self.file_format}"
        return f"{begin}{write_uuid}_{task_index:06}{end}"

    def get_filename_for_block(
        self, block: Any, write_uuid: str, task_index: int, block_index: int
    ) -> str:
        """Return the name of a file of rows, the first of which are in `block`, a pyarrow table."""
        del block, block_index
        return self.get_filename_for_task(write_uuid, task_index)

    def get_filename_for_row(
        self,
        row: dict[str, Any],
        write_uuid: str,
        task_index: int,
        block_index: int,
        row_index: int,
    ) -> str:
        """Return the name of an image, which is in this row."""
        del row
        begin, end = os.path.splitext(self.get_filename_for_task(write_uuid, task_index))
        return f"{begin}_{block_index:06}_{row_index:06}{end}"
