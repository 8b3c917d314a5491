"""The worker process: its start from the zygote, its two main threads, and the call of user code.

What is where:

    start         zygote, import_zygote, main, warmup, gloo_trial
    main threads  control (owns the machine), runner (calls user code)
    user code     entry, program, early_run, importing, environment
    alone         local (in the user's own process)
    the machine   devices (which GPUs it sees), gloo_watchdog, broken_group_hold
    beside        tracking, tracking_process, validation_process, event_writer, profiling

Threads, by name; those below the first two are started when they are needed, and end with the
process. None of them calls user code, and none changes the state of the run.

    (main)                             user code, and the step engine in it
    elastic-control                    the pipe to the agent, the clock, aborts of a group
    elastic-interrupt                  wakes the main thread out of a system call
    elastic-store, -form, -wait        rendezvous store of rank 0; forming a group; waits on torch's
                                       Work that a broken group ends
    elastic-reaper, -nccl-abort        close what is left of an aborted group
    elastic-snapshot, -skeleton        copy the state into a snapshot: tensors, and all else
    elastic-warm-up                    allocates the memory of snapshots
    elastic-writer, -committer         automatic checkpoints to storage, their commit
    elastic-upload, -shared            reported checkpoints to storage; is it the same for all nodes
    elastic-validator                  `train.report(validation=...)`
    elastic-metrics                    lines of `train.report` to storage
    elastic-events, -profile           events.jsonl of the run; `elastic profile`
"""
