"""What a process that reads from the pool sees of a set: which server has what, and where it is mapped."""
