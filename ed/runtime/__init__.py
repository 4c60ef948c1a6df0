"""What runs underneath training: processes, random streams, files, the hub."""
