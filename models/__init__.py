"""Models as ordinary Pyro functions, with the loaders of their data; `base.program` finds one by name."""
