"""What the command lines of these examples have in common."""

from __future__ import annotations

import argparse


def parse(doc: str, **options: int) -> argparse.Namespace:
    """Read the command line of an example.

    Args:
        doc: of the example.
        options: its own whole numbers, with their defaults.

    Returns:
        These, and `num_workers`: from "3", or from "2:3" as (2, 3).
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument(
        "--num-workers", type=parse_workers, default=(2, 3), help="such as 2:3; 0: none"
    )
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def parse_workers(text: str) -> int | tuple[int, int]:
    """Turn "3" into 3 and "2:3" into (2, 3)."""
    low, _, high = text.partition(":")
    return (int(low), int(high)) if high else int(low)
