"""From run folders to tables; needs no torch."""
