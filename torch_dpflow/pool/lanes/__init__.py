"""How bytes of the pool get from one process to another: mapped memory, and streams with their proofs."""
