"""The step engine, and all that a loop over `train.epochs()` meets.

What is where:

    a step        step_engine and its engine_parts, run_state, whole_step, prepared_optimizers,
                  step_values, logbook
    a new group   state_recovery (how members meet, and who gets the state), group_sync (what else
                  they exchange), recovery_modes, resume_point; bystander (a process without steps)
    checkpoints   checkpoint_schedule, state_restore, peer_copies; of a sharded model
                  sharded_choice, sharded_restore
    errors        usage_errors, loop_guard (what a loop must not do) with still_weights (that change
                  too often) and unregistered (what is in no state of the run); divergence (ranks
                  differ), outcome
    the script    train_call (what runs here), context (what it can know of its place)
"""
