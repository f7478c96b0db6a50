"""What excludes what: features that cannot be combined, and why."""

from __future__ import annotations

from collections.abc import Mapping

from dsframe.config.rules.context import PER_TENSOR, RuleContext

_ONE = "remove one of them"

EXCLUDES: Mapping[str, Mapping[str, str]] = {
    "dsframe.model.sync_batch_norm": {
        "accumulation": "several micro-batches in a step, which have statistics of their own",
        "recomputation": "dsframe.model.activation_checkpointing: a block that is recomputed would count twice",
        "compile": "dsframe.model.compile",
        "pipeline": "a pipeline, whose stages have other layers",
        "tensor": "tensor parallelism",
        "sequence": "sequence parallelism",
    },
    "dsframe.per_sample_randomness": {
        "recomputation": "dsframe.model.activation_checkpointing: a block that is recomputed would draw others",
        "compile": "dsframe.model.compile: a compiled model draws by itself",
        "pipeline": "a pipeline, whose stages see parts of a model",
        "tensor": "tensor parallelism, which splits what is drawn",
        "sequence": "sequence parallelism, which splits samples",
    },
    "dsframe.adapter": {
        "pipeline": "a pipeline, whose stages have layers without the model's names",
        "tensor": "tensor parallelism, which replaces the layers",
        "tiling": "dsframe.model.tiling, which replaces the layers",
    },
    "dsframe.adapter.base_format": {
        "stage 3": "ZeRO stage 3, which shards parameters as numbers: bitsandbytes keeps scales beside them",
    },
    "dsframe.ema": {
        "lbfgs": "LBFGS, whose state is not kept by parameter",
        "nvme": "an optimizer on NVMe",
        "zenflow": "ZenFlow, which updates parameters between steps",
    },
    "dsframe.model.offload_activations": {
        "recomputation": "activation_checkpointing, whose blocks keep their inputs only: "
        'for these write "activation_checkpointing": {"cpu_checkpointing": true} outside of "dsframe"',
        "compile": "dsframe.model.compile: torch.compile decides what a block keeps",
    },
    "dsframe.model.loss_chunk_tokens": {
        "pipeline": "a pipeline, whose last stage hands logits to the loss",
        "one graph": '"compile": true: the targets come from outside of the graph',
    },
    "dsframe.model.mlp_chunk_tokens": {"compile": "dsframe.model.compile: a compiled block decides what it keeps"},
    "dsframe.model.tiling": {
        "experts": "expert_parallel",
        "tensor": "tensor parallelism: AutoTP does not know the tiles' names",
        "per tensor": "this optimizer, which computes each update from the full weight",
    },
    "expert_parallel.autoep_size": {
        "pipeline": "a pipeline: dsframe has no test that shows them equal",
        "tensor": "tensor parallelism: dsframe has no test that shows them equal",
        "sequence": "sequence parallelism: dsframe has no test that shows them equal",
        "per tensor": "this optimizer, which computes each update from the full weight",
        "sum": '"gradient_allreduce_op": "sum": DeepSpeed averages experts\' gradients',
        "half": "bf16 or fp16 at stage 0: DeepSpeed averages the ranks' gradient norms, which differ",
        "adapter": "an adapter: AutoEP does not know its layers' names",
        "compile": "dsframe.model.compile: a compiled block cannot communicate",
    },
    "tensor_parallel.autotp_size": {
        "half": "bf16 or fp16 at stage 0: DeepSpeed computes the gradient norm from one rank only",
        "per tensor": "this optimizer, which computes each update from the full weight",
        "sequence": "sequence parallelism: DeepSpeed raises",
    },
    "sequence_parallel_size": {
        "pipeline": "a pipeline, whose stages exchange full sequences",
        "sum": '"gradient_allreduce_op": "sum": gradients of slices are averaged',
        "compile": "dsframe.model.compile: a compiled block cannot communicate",
    },
}
"""Path of a key -> what it is not possible with -> the words for it."""


def check(context: RuleContext) -> None:
    """Report what is on and excludes a key of the file."""
    settings, model, by_deepspeed = context.settings, context.model, context.by_deepspeed
    adapter = settings.adapter
    in_use = {
        "dsframe.model.sync_batch_norm": model.sync_batch_norm,
        "dsframe.per_sample_randomness": settings.per_sample_randomness,
        "dsframe.adapter": adapter,
        "dsframe.adapter.base_format": adapter and adapter.base_format,
        "dsframe.ema": settings.ema,
        "dsframe.model.offload_activations": model.offload_activations,
        "dsframe.model.loss_chunk_tokens": model.loss_chunk_tokens,
        "dsframe.model.mlp_chunk_tokens": model.mlp_chunk_tokens,
        "dsframe.model.tiling": model.tiling,
        "expert_parallel.autoep_size": by_deepspeed and context.file.on("expert_parallel"),
        "tensor_parallel.autotp_size": context.splits_layers,
        "sequence_parallel_size": context.splits_sequences,
    }
    active = {
        "accumulation": (context.file.gradient_accumulation_steps or 1) > 1,
        "recomputation": model.activation_checkpointing,
        "compile": model.compile,
        "one graph": model.compile is True,
        "pipeline": context.pipelined,
        "tensor": context.splits_layers,
        "sequence": context.splits_sequences,
        "experts": by_deepspeed and context.file.on("expert_parallel"),
        "tiling": by_deepspeed and model.tiling,
        "stage 3": by_deepspeed and context.stage == 3,
        "half": context.half and not context.stage,
        "adapter": adapter,
        "sum": context.file.gradient_allreduce_op == "sum",
        "per tensor": context.optimizer in PER_TENSOR,
        "lbfgs": context.optimizer == "lbfgs",
        "nvme": by_deepspeed and context.stage == 3 and context.zero.optimizer_device == "nvme",
        "zenflow": by_deepspeed and context.zero.zenflow is not None,
    }
    for path, others in EXCLUDES.items():
        if in_use[path]:
            for name, words in others.items():
                if active[name]:
                    context.conflict(path, f"not possible with {words}", _ONE)
