"""Encodes samples and batches as payloads, which are frames and blocks of shared memory, and decodes them."""

#: The names of a script's module: where it runs, and in processes that it spawns.
SCRIPT = ("__main__", "__mp_main__")
