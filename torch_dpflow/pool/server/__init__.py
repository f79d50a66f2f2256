"""One server of the pool: what it holds, how it fills it, and who leads."""
