"""The compiled engine: C++ on torch's threads, for float32 and float64 on the CPU."""
