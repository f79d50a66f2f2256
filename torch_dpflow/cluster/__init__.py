"""One loading for many jobs: services, what they decide, and the training process's side."""
