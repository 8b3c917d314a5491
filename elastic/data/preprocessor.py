"""Ray's home of `Preprocessor`."""

from __future__ import annotations

from elastic.data.preprocessors import Preprocessor

__all__ = ["Preprocessor"]
