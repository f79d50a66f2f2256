"""Every struct and limit that two processes agree on: headers, bodies of calls, arguments and settings of processes.

No torch, no sockets, no threads: every process of a cluster imports these modules.
"""
