"""The structs that two processes of any kind agree on: headers, fields, limits, launch specs."""
