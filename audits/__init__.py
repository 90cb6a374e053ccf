"""Audits: attacks on what a run shows, each beside a control that must be caught."""
