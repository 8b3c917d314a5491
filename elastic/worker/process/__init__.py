"""The worker process: its start from the zygote, its two threads, and the call of user code.

What is where:

    start         zygote, import_zygote, main, warmup, gloo_trial
    two threads   control (owns the machine), runner (calls user code)
    user code     entry, program, early_run, importing, environment, error_file
    alone         local (in the user's own process)
    the machine   devices (which GPUs it sees), gloo_watchdog, broken_group_hold
    beside        tracking, tracking_process, validation_process, event_writer, profiling
"""
