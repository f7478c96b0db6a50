"""Commands other than training. The core imports none of them."""
