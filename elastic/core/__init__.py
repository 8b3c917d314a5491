"""The core without IO: state, configuration, events, policies, machines; standard library only."""
