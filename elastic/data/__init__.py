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

from typing import TYPE_CHECKING

from elastic.lazy import lazy_names, refuse_missing

if TYPE_CHECKING:
    from elastic.data.compute import ActorPoolStrategy as ActorPoolStrategy
    from elastic.data.compute import TaskPoolStrategy as TaskPoolStrategy
    from elastic.data.context import DataContext as DataContext
    from elastic.data.context import ExecutionOptions as ExecutionOptions
    from elastic.data.context import ExecutionResources as ExecutionResources
    from elastic.data.context import FileShuffleConfig as FileShuffleConfig
    from elastic.data.context import MixStoppingCondition as MixStoppingCondition
    from elastic.data.context import RandomSeedConfig as RandomSeedConfig
    from elastic.data.context import SaveMode as SaveMode
    from elastic.data.dataset import Dataset as Dataset
    from elastic.data.iterator import DataIterator as DataIterator
    from elastic.data.preprocessors import Preprocessor as Preprocessor
    from elastic.data.reading import from_arrow as from_arrow
    from elastic.data.reading import from_daft as from_daft
    from elastic.data.reading import from_dask as from_dask
    from elastic.data.reading import from_duckdb as from_duckdb
    from elastic.data.reading import from_huggingface as from_huggingface
    from elastic.data.reading import from_items as from_items
    from elastic.data.reading import from_numpy as from_numpy
    from elastic.data.reading import from_pandas as from_pandas
    from elastic.data.reading import from_polars as from_polars
    from elastic.data.reading import from_ray as from_ray
    from elastic.data.reading import from_spark as from_spark
    from elastic.data.reading import from_torch as from_torch
    from elastic.data.reading import range as range  # noqa: A004
    from elastic.data.reading import range_tensor as range_tensor
    from elastic.data.reading import read_binary_files as read_binary_files
    from elastic.data.reading import read_csv as read_csv
    from elastic.data.reading import read_images as read_images
    from elastic.data.reading import read_json as read_json
    from elastic.data.reading import read_lance as read_lance
    from elastic.data.reading import read_numpy as read_numpy
    from elastic.data.reading import read_parquet as read_parquet
    from elastic.data.reading import read_sql as read_sql
    from elastic.data.reading import read_text as read_text
    from elastic.data.reading import read_webdataset as read_webdataset

refuse_missing(
    __name__,
    {
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
    },
)
__getattr__, __dir__, __all__ = lazy_names(__name__)
