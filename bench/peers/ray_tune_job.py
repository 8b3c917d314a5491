"""Short trials under Ray Tune, for bench/tune.py: prints when each function began and ended.

python bench/peers/ray_tune_job.py TRIALS SECONDS SLOTS STORAGE
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray import tune


def trial(config: dict[str, Any]) -> None:
    """Sleep, and report when that began and ended."""
    began = time.time()
    time.sleep(config["seconds"])
    tune.report({"began": began, "slept": time.time()})


def main(trials: int, seconds: float, slots: int, storage: str) -> None:
    """Run a study on a cluster of its own."""
    ray.init(num_cpus=slots, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    grid = tune.Tuner(
        trial,
        param_space={"seconds": seconds},
        tune_config=tune.TuneConfig(num_samples=trials),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    ).fit()
    print(json.dumps([[one.metrics["began"], one.metrics["slept"]] for one in grid]))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
