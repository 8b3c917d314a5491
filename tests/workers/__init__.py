"""Small real processes that stand where workers stand, for tests of what surrounds a worker."""
