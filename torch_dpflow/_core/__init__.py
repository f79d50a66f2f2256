"""Small parts that all packages share, such as checks of arguments, back-off, periodic threads and lazy imports."""
