"""Bodies of the calls between the processes of a cluster, and their settings. Headers and limits: `ipc.messages`.

No torch, no sockets, no threads: every process of a cluster imports these modules.
"""
