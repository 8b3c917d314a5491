"""State machines: step(event, now_ns) -> effects; without IO, clock, threads or logging.

What is where:

    coordinator   coordinator takes each event: agent_messages (of agents), requests (of users),
                  reports (of workers). What has changed is settled at the end of the step:
                  reconcile (one job), queueing and pausing (who gets slots), feeding (jobs that
                  compute data for others), releasing (nodes)
    groups        announcing, draining, early_finish, node_links
    failures      timeouts (late and hung workers), suspicion, node_liveness, health
    checkpoints   saves (requests for them), copies (on other nodes)
    state         jobs, job_parts, cluster_parts, nodes, copy_book, link_book,
                  report_coalescing, restoring
    agent         agent takes each event, agent_orders those of the coordinator. Its state is
                  agent_parts: agent_connection, agent_departure, agent_processes,
                  agent_workers, agent_copies, agent_pacing
    worker        worker takes each event; worker_parts and worker_reports are parts of it
    a step        step: what each call of a training loop is worth; driven by worker.engine
    all of them   transitions (tables of legal moves), invariants, event_history
"""
