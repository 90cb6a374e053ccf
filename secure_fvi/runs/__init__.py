"""A run on disk: its configuration, its data, its folder, its report, and the centralised fit beside it."""
