"""Data loading that many jobs share: services, what they decide, and the training process's side."""
