"""What `pegboard bench` is made of: workloads, a light HTTP client, the load, and the figures of a run."""
