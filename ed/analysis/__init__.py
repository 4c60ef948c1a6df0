"""From run folders to tables: reads files, never tensors, so it works where torch is not."""
