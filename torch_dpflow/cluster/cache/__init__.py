"""Prefetch buffer and cache of a shard, over one set of loaded samples.

A pure state machine, `SampleCache`. It returns loads, cancellations and answers to its shard as instructions.
"""
