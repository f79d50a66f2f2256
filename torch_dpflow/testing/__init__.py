"""Contract suites for samplers, cache policies, transports, storages and platforms; the library imports none."""
