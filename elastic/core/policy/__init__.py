"""Decisions: pure functions (facts, now_ns, config) -> Decision(value, reason).

What is where:

    groups        membership (who is in the next one), ranks, recovery (who sends state to whom),
                  program_points (what a script runs next), node_links, pacing, preemption
    failures      failure (what a lost worker costs), hang, health
    the queue     queue, demands, packing, eviction, placement, scaling, feeding (jobs for others)
    a step        microbatch (who computes what), exchange_plan (who sends what), cursor,
                  data_plan (which samples), seeds, streams
    state         saving, retention, shares (who writes what), replication
    accounts      goodput; decision is what all of them return
    studies       tuning/
"""
