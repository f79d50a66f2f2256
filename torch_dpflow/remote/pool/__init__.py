"""A shard's loaded samples: prefetch buffer and cache over one set of objects. Pure."""
