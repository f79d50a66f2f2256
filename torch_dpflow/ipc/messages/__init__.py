"""Structs and limits shared by processes of any kind: headers, fields, launch specs. No torch, sockets or threads."""
