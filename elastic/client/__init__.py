"""The client library for driver scripts, and the `elastic` command.

What is where:

    calls         jobs (the client), endpoints (which coordinator leads), streams, sources, polling
    commands      cli; job_commands, node_commands, query_commands, checkpoints, events, profiling,
                  stacks, top, tracking, tuning, daemons; terminal and values for all of them
    submitting    submission, job_options, run and run_options (torchrun's command line), torchrun,
                  attempts (which submission may start a run)
    following     job_follower, ctrl_c, stopping, printer, output, output_router, plain
    texts         show, study_show, pace, text_format, loss_summary
    clusters      embedded (ends with this process), local_daemons (`elastic start`)
"""
