"""elastic-agent: the daemon of a node. Starts, watches and ends worker processes; never torch.

Decisions are in `core/machine/agent*.py`. What is where:

    the process   cli (flags, signals), driver (events in, effects out), node_lock, doctor
    coordinator   link (the stream), outbox, leader_discovery, address_book, address, link_prober
    workers       zygote, processes, kernel (exit causes), logs, log_marks, log_follow, old_logs
    the machine   devices (what it has), health and device_health (what is wrong), figures
    state         arenas (snapshots of this node), local_snapshots (of a sharded run),
                  copy_host, copy_server, copy_pusher, copy_store (of other nodes)
"""
