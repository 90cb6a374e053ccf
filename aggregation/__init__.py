"""Secure sums: the only road by which anything computed from a silo's data reaches the server."""
