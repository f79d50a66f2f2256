"""The data service: a dataset's bytes in the memory of a few hosts, and reading ahead of a known order.

Users call it the pool. `remote.pool` is another one: what a shard of a flow has loaded, one object a sample.
"""
