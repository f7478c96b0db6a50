"""Models whose experts can be distributed over ranks. The table of rules has the allowed keys."""

KINDS = ("mixtral", "qwen3_moe")
"""Model types of transformers whose experts AutoEP can distribute; a test compares each with one process."""
