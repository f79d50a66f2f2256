"""Bodies of the calls between a cluster's processes, and settings of these processes. For headers see `ipc.messages`.

No torch, no sockets, no threads: every process of a cluster imports these modules.
"""
