"""Ray's modules by which other libraries report to a trial; see their names."""
