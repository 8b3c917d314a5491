"""Decisions: pure functions (facts, now_ns, config) -> Decision(value, reason)."""
