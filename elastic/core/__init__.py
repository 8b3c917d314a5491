"""The pure core: facts, configuration, events, policies and machines; standard library only."""
