"""What the loop is made of beside the trainer: evaluation, weights of micro-batches, the trial of a loss."""
