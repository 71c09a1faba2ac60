"""G over a set of points, with derivatives of every order: streaming kernels, engines, merging."""
