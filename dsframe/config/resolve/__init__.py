"""What a file leaves open and the run decides: batch, "auto", elastic sizes, learning-rate scaling."""
