"""What decides in the data service: pure, no sockets, threads or clocks."""
