"""A shard's pool of loaded samples: prefetch buffer and cache over one set of objects.

Pure state machines: `Pool`, and `StagedPool` for datasets with a per-draw stage. Loads, cancellations and answers are
instructions that they return to their shard.
"""
