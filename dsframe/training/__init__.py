"""Parts of the training loop next to the trainer: evaluation, weights of micro-batches, tests of the loss."""
