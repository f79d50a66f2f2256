"""Reading of one cached dataset in one process: lookup of its servers, their mapped memory, and other hosts."""
