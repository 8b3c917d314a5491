"""Checkpoints: copied between two steps, written, recorded, marked, validated and deleted.

What is where:

    automatic     snapshotter (when), snapshot_copier (how), snapshot_slots (where to in memory),
                  checkpoint_writer (to storage), checkpoint_files (in which files),
                  snapshot (the data types), replication_progress (to other nodes)
    reported      reporting (`train.report`), report_votes, reported_checkpoints, delivery,
                  validating, validation_child
    both          committer (the order that makes one count), pruning, shared_storage
    reading       checkpoint_reader
"""
