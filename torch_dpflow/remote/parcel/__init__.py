"""Encodes samples and batches as parcels, which are frames and blocks of shared memory, and decodes them."""
