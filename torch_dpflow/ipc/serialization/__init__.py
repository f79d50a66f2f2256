"""Encoding of samples and batches as payloads (frames, and blocks of shared memory), and decoding."""

#: Names of a script's module: in its own process, and in processes that it spawns.
SCRIPT = ("__main__", "__mp_main__")
