"""The owner of tasks and workers: a thread in the training process, or a service."""
