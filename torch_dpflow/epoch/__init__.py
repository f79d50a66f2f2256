"""Position in an epoch: the plan of its batches, the random generators, and the state that is saved."""
