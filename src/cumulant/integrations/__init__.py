"""Foreign libraries, one file each; each library is imported only when it is needed."""
