"""Pure state machines of the services: routing, supervision, placement, autoscaling, flows and their order."""
