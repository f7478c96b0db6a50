"""The sections of ``ds_config.json`` as pydantic models, one module for each family."""
