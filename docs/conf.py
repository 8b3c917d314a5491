"""How `make docs` builds these pages: Sphinx, MyST and furo; a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from elastic import __version__  # noqa: E402

project = "elastic-torch"
author = "the elastic-torch authors"
copyright = author  # noqa: A001
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinxcontrib.mermaid",
    "tables",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"elastic-torch {release}"

myst_heading_anchors = 3
# GitHub shows ```mermaid blocks by itself; here they are the directive of that name.
myst_fence_as_directive = ["mermaid"]
# Options that are set by the environment alone are not on the page that lists options.
suppress_warnings = ["ref.option"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_use_ivar = True
