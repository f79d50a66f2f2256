"""The pure machines of the services: leases, routing, supervision, placement, flows and their order."""
