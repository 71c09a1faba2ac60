"""T1 to T33, one file each."""
