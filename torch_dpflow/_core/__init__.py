"""Small shared parts: checks, backoff, periodic threads, lazy names."""
