"""elastic-agent: the daemon of a node. Starts, watches and ends worker processes; never torch."""
