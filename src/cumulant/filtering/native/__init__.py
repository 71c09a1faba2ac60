"""The compiled recursion: C++ and how to call it."""
