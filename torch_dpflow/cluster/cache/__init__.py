"""Prefetch buffer and cache of a shard, over one set of loaded samples.

`SampleCache` is a pure state machine: it returns instructions to load, to cancel or to answer, which its shard obeys.
"""
