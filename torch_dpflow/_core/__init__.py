"""Small parts without a subject of their own: checks, backoff, periodic threads, lazy names."""
