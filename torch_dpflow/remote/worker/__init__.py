"""What loads: the bodies of worker processes, for batches and for samples."""
