"""Structs and limits that all kinds of processes share: headers, fields, launch specs. No torch, sockets or threads."""
