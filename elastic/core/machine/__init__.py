"""State: one door each, step(event, now_ns) -> effects; no IO, clock, threads or logging."""
