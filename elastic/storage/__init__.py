"""Durable storage through fsspec: run directories, and checkpoints that count once recorded.

What is where:

    files         files (any file system), filesystems (of users), options (to open them with),
                  local_file, outputs (atomic), retry, faults, names
    a run         run_directory, run_record (`run.json`), events, metrics, study_log, summed
    checkpoints   marker (shows that it is recorded), integrity, verify, validation
    trackers      trackers, event_file
"""
