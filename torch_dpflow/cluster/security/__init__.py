"""How one finds a cluster, and proves who one is."""
