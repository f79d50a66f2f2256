"""Cache of a shard, for samples that jobs have requested ahead and samples that may be read again.

`SampleCache` is a pure state machine: its methods return instructions (load, cancel, answer), which the shard executes.
"""
