"""What servers of the pool, their clients and their readers say to each other."""
