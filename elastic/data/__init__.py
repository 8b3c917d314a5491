"""Datasets: read, map, shuffle and feed, each row once, in the same order at any world size.

    from elastic import data, train

    ds = data.read_parquet("s3://bucket/table/").map_batches(tokenize).random_shuffle(seed=1)
    TorchTrainer(train_func, datasets={"train": ds}, ...).fit()

The API follows ray.data. Rule: nothing is read or computed before rows are requested, and pyarrow,
pandas and torch are imported on first use only.

What is where:

    datasets      reading (`read_...`, `from_...`), dataset (its methods), nodes (the lazy plan),
                  writing
    sources       sources, files, formats, parquet, webdataset, databases, datasource/
    operations    operations, functions (of the user), expressions, batches, preprocessors, moments;
                  of all rows at once: gathering (in memory), aggregate, engines (other libraries)
    training      iterator (of a loop), lanes (the order of an epoch), table and table_reader (rows
                  by number), rows (as a torch dataset), kept (the record in the run directory),
                  skipped (what `on_error="skip"` leaves out)
    feeders       feeders (the pool: who is lost, and replaced), feeder (the process),
                  feeder_network (on other nodes)
    Ray's names   arguments, collate_fn, compute, context, datatype, preprocessor
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.data.compute import ActorPoolStrategy, TaskPoolStrategy
    from elastic.data.context import (
        DataContext,
        ExecutionOptions,
        ExecutionResources,
        FileShuffleConfig,
        MixStoppingCondition,
        RandomSeedConfig,
        SaveMode,
    )
    from elastic.data.dataset import Dataset
    from elastic.data.iterator import DataIterator
    from elastic.data.preprocessors import Preprocessor
    from elastic.data.reading import (
        from_arrow,
        from_daft,
        from_dask,
        from_duckdb,
        from_huggingface,
        from_items,
        from_numpy,
        from_pandas,
        from_polars,
        from_ray,
        from_spark,
        from_torch,
        range,  # noqa: A004
        range_tensor,
        read_binary_files,
        read_csv,
        read_images,
        read_json,
        read_lance,
        read_numpy,
        read_parquet,
        read_sql,
        read_text,
        read_webdataset,
    )

__all__ = [
    "ActorPoolStrategy",
    "DataContext",
    "DataIterator",
    "Dataset",
    "ExecutionOptions",
    "ExecutionResources",
    "FileShuffleConfig",
    "MixStoppingCondition",
    "Preprocessor",
    "RandomSeedConfig",
    "SaveMode",
    "TaskPoolStrategy",
    "from_arrow",
    "from_daft",
    "from_dask",
    "from_duckdb",
    "from_huggingface",
    "from_items",
    "from_numpy",
    "from_pandas",
    "from_polars",
    "from_ray",
    "from_spark",
    "from_torch",
    "range",
    "range_tensor",
    "read_binary_files",
    "read_csv",
    "read_images",
    "read_json",
    "read_lance",
    "read_numpy",
    "read_parquet",
    "read_sql",
    "read_text",
    "read_webdataset",
]
_HOME = {
    "ActorPoolStrategy": "compute",
    "DataContext": "context",
    "DataIterator": "iterator",
    "Dataset": "dataset",
    "ExecutionOptions": "context",
    "ExecutionResources": "context",
    "FileShuffleConfig": "context",
    "MixStoppingCondition": "context",
    "Preprocessor": "preprocessors",
    "RandomSeedConfig": "context",
    "SaveMode": "context",
    "TaskPoolStrategy": "compute",
}
_NOT_HERE = {
    "NodeIdStr": "str; DataConfig(datasets_to_split=...) needs none",
    "Datasink": "Dataset.write_parquet, write_csv or write_json",
    "Datasource": "read_parquet, from_items or another of the functions that read",
    **dict.fromkeys(
        (
            "read_bigquery",
            "read_clickhouse",
            "read_databricks_tables",
            "read_mongo",
            "read_snowflake",
        ),
        "query with the database's own driver, and data.from_pandas(...) or from_arrow(...)",
    ),
    **dict.fromkeys(
        (
            "read_delta",
            "read_delta_sharing_tables",
            "read_hudi",
            "read_iceberg",
            "read_unity_catalog",
        ),
        "read with the format's own package, and data.from_arrow(...); or read_parquet",
    ),
    **dict.fromkeys(
        ("read_audio", "read_avro", "read_lerobot", "read_mcap", "read_videos", "read_zarr"),
        "data.read_binary_files(...).map(decode)",
    ),
    **dict.fromkeys(
        ("read_datasource", "read_kafka", "read_orc"),
        "data.from_items(...) or from_arrow(...) of what the package of such a source returns",
    ),
    **dict.fromkeys(
        ("from_arrow_refs", "from_numpy_refs", "from_pandas_refs"),
        "there is no object store: the function without _refs",
    ),
    **dict.fromkeys(("from_tf", "read_tfrecords"), "PyTorch's formats: TensorFlow is not used"),
    **dict.fromkeys(("from_mars", "from_modin"), "data.from_pandas(frame.to_pandas())"),
    "from_blocks": "data.from_arrow(...)",
}
"""Names of ray.data that are missing here -> what to use instead; as an ImportError, because `from`
turns others into one without a word."""


def __getattr__(name: str) -> Any:
    """Load a name from its module on first use."""
    if name in _NOT_HERE:
        raise ImportError(
            f"elastic.data.{name}: Ray has it, and there is none here: {_NOT_HERE[name]}"
        )
    if name not in __all__:
        raise AttributeError(f"module 'elastic.data' has no attribute {name!r}")
    home = _HOME.get(name, "reading")
    return getattr(importlib.import_module(f"elastic.data.{home}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
