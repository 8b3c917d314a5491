"""The core without IO: state, configuration, events, policies, machines; standard library only.

What is where:

    facts         facts (node, worker, group, job), config, telemetry, study (of elastic.tune),
                  view (what users are shown)
    decisions     policy/ (pure functions), machine/ (states), events/ (what goes in and out)
    records       records (what the store holds of jobs and nodes)
    messages      messages, copy_messages
    errors        broken (which texts of others say that a group broke)
"""
