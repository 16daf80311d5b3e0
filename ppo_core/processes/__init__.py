"""What all engines are made of as processes: protocol, permissions, user code, ranks, threads, turns on a GPU."""
