"""Models whose experts can be spread over ranks. Which keys of ``expert_parallel`` are possible is in the table."""

KINDS = ("mixtral", "qwen3_moe")
"""transformers' model types whose experts AutoEP can spread over ranks here; each is compared with one process by a test."""
