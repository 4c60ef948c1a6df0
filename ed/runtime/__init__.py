"""Runtime support: processes, random streams, files, the terminal and the hub."""
