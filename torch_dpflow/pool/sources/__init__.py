"""Where the bytes of a set come from: stored datasets and arrays, and their names."""
