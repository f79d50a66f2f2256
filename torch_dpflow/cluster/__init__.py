"""Data loading that many jobs share: services, their decisions, and the training process's side."""
