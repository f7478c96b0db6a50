"""Guards that end a run: hangs, values that are not finite, requests to stop."""
