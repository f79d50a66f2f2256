"""Service processes of a cluster: coordinator, router, node, provisioner, live page; and the cluster of one host."""
