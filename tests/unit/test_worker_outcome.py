"""How exceptions of user code are told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic.errors import GroupError
from elastic.worker.engine import outcome


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_whose_text_raises_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    assert "KeyError" in outcome.failure_of(raised(Mute())).message


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (dist.DistNetworkError("x"), True),
        (dist.DistBackendError("x"), True),
        (dist.DistStoreError("x"), True),
        (GroupError("x"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (raised(ValueError("wrapped"), RuntimeError("[gloo] x")), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("Connection closed by peer"), False),
        (ConnectionResetError("the user's own socket"), False),
    ],
)
def test_a_broken_group_is_told_from_a_fault_of_user_code(
    error: BaseException, is_broken: bool
) -> None:
    assert outcome.is_group_broken(error) is is_broken


@pytest.mark.parametrize(
    ("code", "expected"), [(None, 0), (0, 0), (3, 3), (-1, 255), (256, 1), ("no data", 1)]
)
def test_exit_codes_are_what_the_interpreter_would_make_of_them(
    code: int | str | None, expected: int
) -> None:
    assert outcome.exit_code_of(SystemExit(code)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"accuracy": 0.5}, '{"accuracy": 0.5}'),
        ({"accuracy": np.float32(0.5)}, '{"accuracy": 0.5}'),
        ([torch.tensor(3), np.array([0.5]), torch.tensor([[2.0]])], "[3, 0.5, 2.0]"),
        (None, "null"),
    ],
)
def test_what_a_train_function_returns_is_kept_with_others_numbers(
    value: object, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome.result_json(value) == expected
    assert not caplog.text


@pytest.mark.parametrize(
    "value", [object(), {"weights": torch.ones(2)}, {1j: 2}, torch.ones(1, device="meta")]
)
def test_a_result_that_json_cannot_say_is_null_and_the_log_says_so(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome.result_json(value) == "null"
    assert f"result_lost type={type(value).__name__}" in caplog.text


def test_forgotten_frames_free_what_they_held() -> None:
    import gc
    import weakref

    class Model:
        pass

    def train() -> None:
        model = Model()
        kept.append(weakref.ref(model))
        raise ValueError("x")

    kept: list[weakref.ref[Model]] = []
    error: BaseException
    try:
        train()
    except ValueError as caught:
        error = caught
    outcome.forget_frames(error)
    gc.collect()
    assert kept[0]() is None
