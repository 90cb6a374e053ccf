"""Federated algorithms, one paper's a file."""
