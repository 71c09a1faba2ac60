"""G over a set of points, with every derivative: dense oracle, streaming, merge."""
