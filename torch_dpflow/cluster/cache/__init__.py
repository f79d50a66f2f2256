"""Prefetch buffer and cache of a shard, over one set of loaded samples.

Pure state machines: `SampleCache`, and `StagedSampleCache` for datasets with a per-draw stage. They return loads,
cancellations and answers to their shard as instructions.
"""
