"""The processes of a cluster: coordinator, router, node, and the cluster of one host."""
