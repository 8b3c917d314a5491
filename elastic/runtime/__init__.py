"""The outside world, one seam per thing: clocks, gRPC, the event log.

What is where:

    gRPC          rpc (addresses, options, errors), services (calls), stream, access (credentials)
                  and its access_options, certificates
    sockets       listening, route (to find one's own address), worker_ports, secret_server and
                  secret_connection (between processes that know a secret), copy_wire (snapshots
                  between nodes)
    the process   clock, tether (to the process that started it), ready, leaving, cgroup,
                  descriptors, snapshot_memory
    output        logging_thread, eventlog, exposition (metrics for Prometheus)
"""
