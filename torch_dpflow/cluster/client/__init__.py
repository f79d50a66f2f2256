"""The training process's side of a shared flow: joins it, requests samples ahead of need, and collates batches."""
