"""Engines carry bytes between parties and know nothing of what is in them."""
