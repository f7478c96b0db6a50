"""Commands around training. The core imports none of them."""
