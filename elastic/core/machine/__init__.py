"""State machines: step(event, now_ns) -> effects; without IO, clock, threads or logging."""
