"""torch.distributed groups that form, break and form again in one process.

What is where:

    a group       group forms and aborts; group_resources holds the connections of one generation
    meeting       store_server, group_store, store_wire: the rendezvous store and its clients
    own traffic   member_links, peer_sockets, shared_memory, accelerators; connections (what is cut)
    torch, gloo   c10d (private parts of torch), background_saves, gloo_sockets, gloo_port
    stuck waits   abortable_wait, collective_watch
"""
