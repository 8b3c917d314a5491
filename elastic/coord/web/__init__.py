"""The coordinator's web page: jobs, studies and metrics over HTTP, for people and Prometheus."""
