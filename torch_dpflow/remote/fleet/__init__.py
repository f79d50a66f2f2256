"""How many workers there are beyond this host, who has called, and what to do about those that have not."""
