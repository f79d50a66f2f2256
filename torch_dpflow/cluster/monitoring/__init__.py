"""Monitoring of a cluster: its figures, the live page, and metrics for Prometheus."""
