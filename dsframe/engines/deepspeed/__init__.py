"""DeepSpeed: ZeRO 0 to 3, offload, pipeline, tensor and sequence parallelism."""
