"""The bodies of worker processes: `batch_worker` for the private loader, `sample_worker` for shared flows."""
