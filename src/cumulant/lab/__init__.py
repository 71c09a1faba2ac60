"""Experiments on the library: claims of the paper, benchmarks, the report.

They use the library as a user would. Nothing a library user needs lives here, and nothing outside
`lab` and `cli` imports it.
"""
