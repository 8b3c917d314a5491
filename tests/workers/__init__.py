"""Small processes that replace workers in tests of agents and groups."""
