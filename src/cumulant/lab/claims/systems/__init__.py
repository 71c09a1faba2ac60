"""Systems the paper builds on that no single claim covers, one file each."""
