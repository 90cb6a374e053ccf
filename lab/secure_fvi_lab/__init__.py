"""What researchers run and an institution needs not: experiments of the papers, and benchmarks.

A package of its own beside `secure_fvi`, which never imports it; its commands are found by entry points.
"""
