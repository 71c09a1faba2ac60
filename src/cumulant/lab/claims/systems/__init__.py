"""Systems the paper leans on that no single claim is about, one file each."""
