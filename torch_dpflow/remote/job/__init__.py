"""The training process's side of a shared flow."""
