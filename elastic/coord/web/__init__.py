"""The page of a coordinator: jobs, studies and metrics over HTTP, for people and Prometheus."""
