"""`elastic.init` in Ray's words: what is taken, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

import elastic
from elastic.errors import ElasticError
from elastic.train.cluster_options import offered, slots, worker_env


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_cpus": 1.5}, "num_cpus=1.5: expected an int"),
        ({"num_gpus": -1}, "num_gpus=-1: expected an int"),
        ({"resources": {"disk": "2"}}, r"resources\['disk'\]='2': expected numbers"),
        ({"resources": {"CPU": 2}}, "resources has CPU: pass num_cpus"),
        ({"runtime_env": {"pip": ["x"]}}, "'pip', which is not done here: install packages"),
        ({"runtime_env": {"working_dir": "/nowhere"}}, "working_dir='/nowhere': workers run"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, r"env_vars\['A'\]=1: expected a str"),
        ({"local_mode": True}, "num_workers=0"),
        ({"address": "h:1", "num_cpus": 2}, "CPU are for a cluster of this script's own"),
    ],
)
def test_what_init_cannot_do_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ElasticError, match=says):
        elastic.init(**arguments)
    with pytest.raises(TypeError, match="'num_cpu'"):
        elastic.init(num_cpu=2)


def test_a_cluster_of_a_scripts_own_offers_what_was_asked_for() -> None:
    amounts = offered(3, None, {"disk": 2})
    assert (amounts, slots(None, amounts)) == ({"disk": 2.0, "CPU": 3.0}, 3)
    assert slots(None, offered(None, None, None)) >= 1
    assert slots(5, amounts) == 5
    assert worker_env({"env_vars": {"A": "1"}, "working_dir": "."}) == {"A": "1"}
