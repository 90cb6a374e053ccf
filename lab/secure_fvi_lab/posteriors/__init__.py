"""Models with posteriors that are known, for tests and benchmarks."""
