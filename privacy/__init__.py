"""What may leave a silo: the gate that every contribution passes."""
