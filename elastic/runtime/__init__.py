"""The outside world, one seam per thing: clocks, gRPC, the event log."""
