"""How often peers are pinged follows from how long a host may be silent."""

from __future__ import annotations

import pytest

from elastic.runtime.rpc import (
    SILENCE_KEY,
    SILENCE_S,
    SILENCE_S_MAX,
    SILENCE_S_MIN,
    channel_options,
    server_options,
    silence_of,
)


@pytest.mark.parametrize("silence_s", [SILENCE_S_MIN, SILENCE_S, 6.0, SILENCE_S_MAX])
def test_a_silent_peer_is_noticed_in_time_and_agents_leave_pings_to_the_coordinator(
    silence_s: float,
) -> None:
    ours, theirs = dict(server_options(silence_s=silence_s)), dict(channel_options(silence_s))
    for side in (ours, theirs):
        assert side["grpc.keepalive_timeout_ms"] == side["grpc.http2.ping_timeout_ms"]
        noticed_ms = side["grpc.keepalive_time_ms"] + side["grpc.http2.ping_timeout_ms"]
        assert 0.9 * silence_s * 1000 <= noticed_ms <= silence_s * 1000
    assert ours["grpc.keepalive_time_ms"] < theirs["grpc.keepalive_time_ms"]


@pytest.mark.parametrize(
    ("said", "silence_s"),
    [
        ((), SILENCE_S),
        (((SILENCE_KEY, "6000"),), 6.0),
        (((SILENCE_KEY, "1"),), SILENCE_S_MIN),
        (((SILENCE_KEY, "9" * 32),), SILENCE_S_MAX),
        (((SILENCE_KEY, "9" * 5000),), SILENCE_S),
        (((SILENCE_KEY, "soon"),), SILENCE_S),
        (((SILENCE_KEY, "-6000"),), SILENCE_S),
    ],
)
def test_what_a_coordinator_says_of_it_is_taken_within_bounds(
    said: tuple[tuple[str, str], ...], silence_s: float
) -> None:
    assert silence_of(said) == silence_s
