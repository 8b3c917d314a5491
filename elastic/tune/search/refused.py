"""Searchers of Ray that wrap other libraries: refused by name, with what to use instead."""

from __future__ import annotations

from typing import NoReturn


def refuse(module: str) -> NoReturn:
    """Explain why a module is missing; as an ImportError, which `from ... import` passes on."""
    raise ImportError(
        f"{module}: Ray has it, and there is none here: elastic.tune.search.optuna.OptunaSearch "
        f"proposes by Optuna's samplers (TPE, GP, CMA-ES, NSGA-II), and a subclass of "
        f"elastic.tune.search.Searcher by what you like"
    )
