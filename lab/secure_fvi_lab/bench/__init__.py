"""What `secure-fvi bench` measures, one a module."""
