"""A shard's cache of loaded samples: prefetch buffer and cache over one set of objects.

Pure state machines: `SampleCache`, and `StagedSampleCache` for datasets with a per-draw stage. They return loads,
cancellations and answers to their shard as instructions.
"""
