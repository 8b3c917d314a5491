"""How parameters are cut into buckets."""

from __future__ import annotations

import torch
from torch import nn

from elastic.worker.buckets import Unit, lay_out


def test_buckets_are_cut_by_unit_and_type_from_the_last_parameter_on() -> None:
    def parameters(*types: torch.dtype) -> list[tuple[str, nn.Parameter]]:
        made = [nn.Parameter(torch.zeros(100, dtype=one)) for one in types]
        return [(str(number), one) for number, one in enumerate(made)]

    half, single = torch.bfloat16, torch.float32
    units = [Unit("a", parameters(single, half, single)), Unit("b", parameters(single))]
    buckets = lay_out(units, bucket_bytes=1000)
    assert [(b.unit, b.dtype, b.names) for b in buckets] == [
        (0, single, ["2", "0"]),
        (0, half, ["1"]),
        (1, single, ["0"]),
    ]
    assert [b.names for b in lay_out(units[:1], bucket_bytes=400)] == [["2"], ["1"], ["0"]]
