"""Attacks on a fit, and what they prove: lower bounds with confidence, never upper ones."""
