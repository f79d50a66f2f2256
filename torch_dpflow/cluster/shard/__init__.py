"""The service that owns the tasks, the cache and the workers of some samples of a flow."""
