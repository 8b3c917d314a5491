"""Shared code of fault-injected jobs whose loop is another library's.

They trace as `steps_job.py` does, and obey the same orders; run by their paths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic import train
from elastic.train.torch import TorchTrainer


def run(train_func: Callable[[dict[str, Any]], Any]) -> None:
    """Read the arguments, train, and print what the train function returned.

    Args:
        train_func: called with a dict of the options below.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--trace", default="", help="folder for the hashes of every step")
    parser.add_argument("--orders", default="", help="folder of strikes")
    parser.add_argument("--finish", default="", help="end when this file comes")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each micro-batch")
    output = str(Path.home() / "output")
    parser.add_argument("--output", default=output, help="folder of the library's own files")
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(parser.parse_args()),
        scaling_config=train.ScalingConfig(num_workers=0),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))
