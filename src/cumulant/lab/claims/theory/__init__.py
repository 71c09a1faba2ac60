"""T1 to T42, one file each."""
