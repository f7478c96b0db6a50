# ruff: noqa: E501 - a table: one line for each message
"""Single mistakes, each with the exact message: what ``dsframe check`` prints for it."""

from __future__ import annotations

import pytest

from dsframe.config.load import examine
from dsframe.engines import TABLE

*OTHERS, LAST = ["auto", *TABLE]
ENGINES = ", ".join(f'"{name}"' for name in OTHERS) + f' or "{LAST}"'

MISTAKES = [
    (
        "top-level typo",
        '{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}',
        'f.json:1:25: error: zero_optimisation: unknown key; did you mean "zero_optimization"? [unknown-key]',
    ),
    (
        "typo in a scalar",
        '{"train_batch_size": 8, "gradient_acumulation_steps": 2}',
        'f.json:1:25: error: gradient_acumulation_steps: unknown key; did you mean "gradient_accumulation_steps"? [unknown-key]',
    ),
    (
        "typo in a section",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}',
        'f.json:1:59: error: zero_optimization.overlap_com: unknown key; did you mean "overlap_comm"? [unknown-key]',
    ),
    (
        "typo two levels down",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}}',
        'f.json:1:81: error: zero_optimization.offload_optimizer.devise: unknown key; did you mean "device"? [unknown-key]',
    ),
    (
        "typo in optimizer params",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "wieght_decay": 0.1}}}',
        'f.json:1:78: error: optimizer.params.wieght_decay: unknown key; did you mean "weight_decay"? [unknown-key]',
    ),
    (
        "typo in scheduler params",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_step": 10}}}',
        'f.json:1:70: error: scheduler.params.warmup_step: unknown key; did you mean "warmup_num_steps"? [unknown-key]',
    ),
    (
        "camel case",
        '{"train_batch_size": 8, "gradientClipping": 1.0}',
        'f.json:1:25: error: gradientClipping: unknown key; did you mean "gradient_clipping"? [unknown-key]',
    ),
    (
        "ring attention",
        '{"train_batch_size": 8, "context_parallel_size": 2}',
        'f.json:1:25: error: context_parallel_size: unknown key: there is no ring attention here, because torch\'s has no kernel for CPUs; write "sequence_parallel_size": N, which exchanges heads [unknown-key]',
    ),
    (
        "unknown key",
        '{"train_batch_size": 8, "wibble": 1}',
        'f.json:1:25: error: wibble: unknown key; DeepSpeed ignores it; remove it, or pass it on with "dsframe": {"pass_through": ["wibble"]} [unknown-key]',
    ),
    (
        "unknown key in a pydantic section",
        '{"train_batch_size": 8, "fp16": {"enabled": true, "wibble": 1}}',
        'f.json:1:51: error: fp16.wibble: unknown key; DeepSpeed raises; remove it, or pass it on with "dsframe": {"pass_through": ["fp16.wibble"]} [unknown-key]',
    ),
    (
        "misspelled and right",
        '{"train_batch_size": 8, "gradient_cliping": 1.0, "gradient_clipping": 1.0}',
        'f.json:1:25: error: gradient_cliping: unknown key; it looks like "gradient_clipping", which the file has as well; keep one [unknown-key]',
    ),
    (
        "misplaced section",
        '{"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_optimization": {"stage": 2}}',
        'f.json:1:25: error: offload_optimizer: belongs under "zero_optimization" [misplaced-key]',
    ),
    (
        "misplaced scalar",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "gradient_clipping": 1.0}}',
        "f.json:1:59: error: zero_optimization.gradient_clipping: belongs at the top level [misplaced-key]",
    ),
    (
        "misplaced learning rate",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "lr": 0.1}}',
        'f.json:1:55: error: optimizer.lr: belongs under "optimizer.params" [misplaced-key]',
    ),
    (
        "stage at the top",
        '{"train_batch_size": 8, "stage": 2}',
        'f.json:1:25: error: stage: belongs under "zero_optimization" [misplaced-key]',
    ),
    (
        "removed section",
        '{"train_batch_size": 8, "elasticity": {"enabled": true}}',
        "f.json:1:25: error: elasticity: removed from DeepSpeed 0.19, which raises if the key is present; set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps yourself [removed]",
    ),
    (
        "removed key",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}',
        "f.json:1:59: error: zero_optimization.mics_shard_size: removed from DeepSpeed 0.19, which raises if the key is present; use zero_hpz_partition_size for a secondary partition [removed]",
    ),
    (
        "removed and off",
        '{"train_batch_size": 8, "amp": {"enabled": false}}',
        "f.json:1:25: error: amp: removed from DeepSpeed 0.19, which raises if the key is present; remove it (it is switched off) [removed]",
    ),
    (
        "key of another tool",
        '{"train_batch_size": 8, "max_grad_norm": 1.0}',
        'f.json:1:25: error: max_grad_norm: unknown key; did you mean "gradient_clipping"? [unknown-key]',
    ),
    (
        "steps of another tool",
        '{"train_batch_size": 8, "dsframe": {"max_steps": 100}}',
        'f.json:1:37: error: dsframe.max_steps: unknown key; did you mean "steps"? [unknown-key]',
    ),
    (
        "samples of another tool",
        '{"train_batch_size": 8, "dsframe": {"task": {"name": "vision", "train_samples": 100}}}',
        'f.json:1:64: error: dsframe.task.train_samples: unknown key; did you mean "samples"? [unknown-key]',
    ),
    (
        "checkpoints of another tool",
        '{"train_batch_size": 8, "dsframe": {"save_steps": 100}}',
        'f.json:1:37: error: dsframe.save_steps: unknown key; write "checkpoints": {"every_steps": N} [unknown-key]',
    ),
    (
        "fp32 all-reduce",
        '{"train_batch_size": 8, "fp32_allreduce": true}',
        'f.json:1:25: error: fp32_allreduce: removed from DeepSpeed, which ignores it; write "communication_data_type": "fp32" [unknown-key]',
    ),
    (
        "Apex option",
        '{"train_batch_size": 8, "fp16": {"enabled": true, "opt_level": "O2"}}',
        "f.json:1:51: error: fp16.opt_level: an option of Apex, which DeepSpeed no longer uses: it raises; remove it [unknown-key]",
    ),
    (
        "loss scale of bf16",
        '{"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}}',
        "f.json:1:51: error: bf16.loss_scale: bf16 has no loss scaling: DeepSpeed raises; remove it [unknown-key]",
    ),
    (
        "max_grad_norm in params",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}}}',
        'f.json:1:77: error: optimizer.params.max_grad_norm: not an argument of an optimizer: DeepSpeed raises; write "gradient_clipping" at the top level [unknown-key]',
    ),
    (
        "duplicate key",
        '{"train_batch_size": 8, "steps_per_print": 1, "steps_per_print": 2}',
        "f.json:1:47: error: steps_per_print: duplicate key, first on line 1: DeepSpeed raises; keep one [duplicate-key]",
    ),
    (
        "duplicate key inside",
        '{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}',
        "f.json:1:51: error: fp16.enabled: duplicate key, first on line 1: DeepSpeed raises; keep one [duplicate-key]",
    ),
    (
        "text for a rate",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}',
        'f.json:1:72: error: optimizer.params.lr: "1e-3" must be a number; write 1e-3 without quotes [type]',
    ),
    (
        "text for a number",
        '{"train_batch_size": 8, "gradient_clipping": "1.0"}',
        'f.json:1:46: error: gradient_clipping: "1.0" must be a number; write 1.0 without quotes [type]',
    ),
    (
        "text for a switch",
        '{"train_batch_size": 8, "wall_clock_breakdown": "false"}',
        'f.json:1:49: error: wall_clock_breakdown: "false" must be true or false; write false without quotes [type]',
    ),
    (
        "exponent in text",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}',
        'f.json:1:81: error: zero_optimization.reduce_bucket_size: "5e8" must be a whole number; write 5e8 without quotes [type]',
    ),
    (
        "true for a number",
        '{"train_batch_size": 8, "zero_optimization": {"stage": true}}',
        "f.json:1:56: error: zero_optimization.stage: true must be 0, 1, 2 or 3 [type]",
    ),
    (
        "true for a batch",
        '{"train_batch_size": true}',
        "f.json:1:22: error: train_batch_size: true must be a whole number [type]",
    ),
    (
        "fraction for a count",
        '{"train_batch_size": 8, "gradient_accumulation_steps": 1.5}',
        "f.json:1:56: error: gradient_accumulation_steps: 1.5 must be a whole number [type]",
    ),
    (
        "switch for a section",
        '{"train_batch_size": 8, "bf16": true}',
        'f.json:1:33: error: bf16: expected an object, found true; write {"enabled": true} [type]',
    ),
    (
        "list for a section",
        '{"train_batch_size": 8, "zero_optimization": [2]}',
        "f.json:1:46: error: zero_optimization: expected an object, found [2]; write an object {...} [type]",
    ),
    (
        "null for a section",
        '{"train_batch_size": 8, "fp16": null}',
        "f.json:1:33: error: fp16: null is not an object: DeepSpeed raises; remove the key [type]",
    ),
    (
        "device for a section",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
        'f.json:1:80: error: zero_optimization.offload_optimizer: "cpu" must be an object {...}; write {"device": "cpu"} [type]',
    ),
    (
        "impossible auto",
        '{"train_batch_size": 8, "steps_per_print": "auto"}',
        'f.json:1:44: error: steps_per_print: "auto" is not possible here; write a value, or remove the key [auto]',
    ),
    (
        "impossible auto in params",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": "auto"}}}',
        'f.json:1:91: error: optimizer.params.torch_adam: "auto" is not possible here; write a value, or remove the key [auto]',
    ),
    (
        "stage out of range",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 4}}',
        "f.json:1:56: error: zero_optimization.stage: 4 must be 0, 1, 2 or 3 [value]",
    ),
    (
        "negative norm",
        '{"train_batch_size": 8, "gradient_clipping": -1}',
        "f.json:1:46: error: gradient_clipping: -1 must be at least 0 [range]",
    ),
    (
        "zero batch",
        '{"train_batch_size": 0}',
        "f.json:1:22: error: train_batch_size: 0 must be above 0 [range]",
    ),
    (
        "beta of one",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}',
        "f.json:1:81: error: optimizer.params.betas[1]: 1 must be below 1 [range]",
    ),
    (
        "one beta",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}',
        "f.json:1:75: error: optimizer.params.betas: [0.9] must have 2 items [range]",
    ),
    (
        "bucket of nothing",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}',
        "f.json:1:81: error: zero_optimization.reduce_bucket_size: 0 must be above 0 [range]",
    ),
    (
        "infinity",
        '{"train_batch_size": 8, "gradient_clipping":\nInfinity\n}',
        "f.json:2:1: error: gradient_clipping: Infinity without quotes is text and must be a number; JSON has no infinity: write a large number [type]",
    ),
    (
        "number too large",
        '{"train_batch_size": 8, "gradient_clipping": 1e999}',
        "f.json:1:46: error: the number 1e999... is too large [syntax]",
    ),
    (
        "unknown device",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}',
        'f.json:1:87: error: zero_optimization.offload_param.device: "gpu" must be "none", "cpu" or "nvme"; did you mean "none"? [value]',
    ),
    (
        "misspelled device",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvm"}}}',
        'f.json:1:87: error: zero_optimization.offload_param.device: "nvm" must be "none", "cpu" or "nvme"; did you mean "nvme"? [value]',
    ),
    (
        "unknown optimizer",
        '{"train_batch_size": 8, "optimizer": {"type": "AdamX", "params": {}}}',
        'f.json:1:47: error: optimizer.type: "AdamX" is neither in DeepSpeed nor in torch.optim; did you mean "Adam"? [value]',
    ),
    (
        "case of a torch optimizer",
        '{"train_batch_size": 8, "optimizer": {"type": "sgd", "params": {}}}',
        'f.json:1:47: error: optimizer.type: "sgd" is neither in DeepSpeed nor in torch.optim; did you mean "SGD"? [value]',
    ),
    (
        "removed optimizer",
        '{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {}}}',
        'f.json:1:47: error: optimizer.type: "OneBitAdam" cannot be used: 1-bit Adam has been removed from DeepSpeed [value]',
    ),
    (
        "optimizer with a closure",
        '{"train_batch_size": 8, "optimizer": {"type": "LBFGS", "params": {}}}',
        "f.json:1:47: error: optimizer.type: LBFGS evaluates a batch several times, which DeepSpeed cannot; "
        'write "engine": "ddp", "horovod" or "single" in the "dsframe" section [conflict]',
    ),
    (
        "a closure and draws by sample",
        '{"train_batch_size": 8, "gradient_clipping": 0, "optimizer": {"type": "LBFGS", "params": {}}, '
        '"dsframe": {"engine": "ddp", "per_sample_randomness": true}}',
        "f.json:1:149: error: dsframe.per_sample_randomness: not possible with LBFGS, which draws once for each batch; "
        "remove it, or choose another optimizer [conflict]",
    ),
    (
        "no type",
        '{"train_batch_size": 8, "optimizer": {"params": {"lr": 0.1}}}',
        "f.json:1:25: error: optimizer.type: is required; add it [missing]",
    ),
    (
        "unknown scheduler",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLr", "params": {}}}',
        'f.json:1:47: error: scheduler.type: "WarmupLr" is neither in DeepSpeed nor in torch.optim.lr_scheduler; did you mean "WarmupLR"? [value]',
    ),
    (
        "scheduler without params",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}}',
        'f.json:1:25: error: scheduler: "params" is required: DeepSpeed raises; add "params": {} [missing]',
    ),
    (
        "required parameter",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {}}}',
        "f.json:1:64: error: scheduler.params.total_num_steps: is required; add it [missing]",
    ),
    (
        "communication type",
        '{"train_batch_size": 8, "communication_data_type": "fp8"}',
        'f.json:1:52: error: communication_data_type: "fp8" must be "fp16", "bf16" or "fp32" [value]',
    ),
    (
        "reduction",
        '{"train_batch_size": 8, "gradient_allreduce_op": "max"}',
        'f.json:1:50: error: gradient_allreduce_op: "max" must be "mean" or "sum" [value]',
    ),
    (
        "fp16 and bf16",
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "f.json:1:72: error: bf16.enabled: fp16 is enabled as well: DeepSpeed raises; enable one of them [conflict]",
    ),
    (
        "pipeline and ZeRO-2",
        '{"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}',
        "f.json:1:83: error: zero_optimization.stage: 2 is not possible with a pipeline: DeepSpeed raises; use stage 0 or 1 [conflict]",
    ),
    (
        "NVMe without a path",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
        'f.json:1:87: error: zero_optimization.offload_param.device: "nvme" needs "nvme_path": DeepSpeed raises; add the folder on the drive [conflict]',
    ),
    (
        "partial offload below stage 3",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}',
        "f.json:1:107: error: zero_optimization.offload_optimizer.ratio: below 1.0 is possible at stage 3 only: DeepSpeed raises; remove it [conflict]",
    ),
    (
        "sum at stage 3",
        '{"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}',
        'f.json:1:50: error: gradient_allreduce_op: "sum" is not possible with ZeRO stage 3: DeepSpeed raises; write "mean" [conflict]',
    ),
    (
        "prescaling at stage 2",
        '{"train_batch_size": 8, "prescale_gradients": true, "zero_optimization": {"stage": 2}}',
        'f.json:1:47: error: prescale_gradients: true is not possible with reduce-scatter at stage 2: DeepSpeed raises; write "reduce_scatter": false under "zero_optimization", or remove it [conflict]',
    ),
    (
        "SGD with ZeRO",
        '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}',
        'f.json:1:47: error: optimizer.type: SGD is untested with ZeRO: DeepSpeed raises; add "zero_allow_untested_optimizer": true [conflict]',
    ),
    (
        "a course that overrules Muon's rates",
        '{"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}',
        'f.json:1:124: error: scheduler.type: WarmupLR sets one rate for all parameters here, but Muon\'s two halves have 0.02 and 0.0003; write one "lr" under "optimizer", or choose WarmupCosineLR [conflict]',
    ),
    (
        "an optimizer's key that is not known",
        '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "wibble": 1}}}',
        "f.json:1:76: error: optimizer.params.wibble: unknown key; DeepSpeed raises; remove it [unknown-key]",
    ),
    (
        "a schedule from its midst",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}}',
        "f.json:1:94: error: scheduler.params.last_batch_iteration: 5 has no meaning here: the schedule starts at the checkpoint's step; remove it, and continue with --resume [conflict]",
    ),
    (
        "bf16 masters on the device",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        'f.json:1:119: error: bf16.bf16_master_weights_and_grads: needs optimizer offload with DeepSpeed\'s CPU Adam, or bf16_optimizer_states: DeepSpeed raises; add "offload_optimizer": {"device": "cpu"}, or "bf16_optimizer_states": true [conflict]',
    ),
    (
        "torch argument",
        '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "fused": true}}}',
        "f.json:1:87: error: optimizer.params.fused: an argument of torch's Adam only: DeepSpeed's Adam raises; add \"torch_adam\": true [conflict]",
    ),
    (
        "master weights without ZeRO",
        '{"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        "f.json:1:84: error: bf16.bf16_master_weights_and_grads: needs ZeRO: DeepSpeed raises; set the stage to 1, 2 or 3 [conflict]",
    ),
    (
        "old name and new",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}',
        'f.json:1:59: error: zero_optimization.cpu_offload: deprecated name of "offload_optimizer", which the file has as well: DeepSpeed raises; remove it [conflict]',
    ),
    (
        "curriculum without metrics",
        '{"train_batch_size": 8, "data_efficiency": {"enabled": true, "data_sampling": {"enabled": true, "curriculum_learning": {"enabled": true}}}}',
        "f.json:1:120: error: data_efficiency.data_sampling.curriculum_learning: curriculum_metrics is required: DeepSpeed raises; add it [conflict]",
    ),
    (
        "no batch size",
        '{"steps_per_print": 10}',
        'f.json:1:1: error: no batch size: DeepSpeed needs one; write "train_batch_size" or "train_micro_batch_size_per_gpu" [batch]',
    ),
    (
        "batch sizes that disagree",
        '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}',
        "f.json:1:22: error: train_batch_size: 100 is not divisible by 8 (micro) x 4 (accumulation), on any number of processes; the nearest legal batch sizes are 96 or 128 [batch]",
    ),
    (
        "epochs and steps",
        '{"train_batch_size": 8, "dsframe": {"epochs": 1, "steps": 10}}',
        "f.json:1:59: error: dsframe.steps: epochs is given as well; keep one of them [conflict]",
    ),
    (
        "unknown engine",
        '{"train_batch_size": 8, "dsframe": {"engine": "horovodd"}}',
        'f.json:1:47: error: dsframe.engine: "horovodd" must be ' + ENGINES + '; did you mean "horovod"? [value]',
    ),
    (
        "one stage to cut into",
        '{"train_batch_size": 8, "dsframe": {"engine": "reference-model-parallel"}}',
        'f.json:1:47: error: dsframe.engine: this engine puts one of pipeline.stages on each process, and pipeline.stages is 1; add "pipeline": {"stages": 2} [conflict]',
    ),
    (
        "heads and width",
        '{"train_batch_size": 8, "dsframe": {"task": {"name": "language", "heads": 3}}}',
        "f.json:1:75: error: dsframe.task.heads: 3 does not divide width 256; choose another [conflict]",
    ),
    (
        "task without a class",
        '{"train_batch_size": 8, "dsframe": {"task": {"name": "my.module:"}}}',
        'f.json:1:54: error: dsframe.task.name: "my.module:" is not "package.module:Class" [range]',
    ),
    (
        "unknown task",
        '{"train_batch_size": 8, "dsframe": {"task": {"name": "visoin"}}}',
        'f.json:1:54: error: dsframe.task.name: "visoin" must be "vision", "language", "causal-language-model", "image-classification" or "package.module:Class"; did you mean "vision"? [value]',
    ),
    (
        "unclosed",
        '{"train_batch_size": 8, "fp16": {"enabled": true}',
        'f.json:1:1: error: "{" is never closed; add the missing } [syntax]',
    ),
    (
        "word of Python",
        '{"train_batch_size": 8, "fp16": {"enabled": True}}',
        "f.json:1:45: error: True without quotes is text to the end of the line, brackets included; write true [syntax]",
    ),
    (
        "missing colon",
        '{"train_batch_size" 8}',
        "f.json:1:21: error: expected ':' after the key, found '8}' [syntax]",
    ),
    (
        "text without end",
        '{"train_batch_size": 8, "optimizer": {"type": "Adam}}\n',
        'f.json:1:47: error: text without a closing "; add the missing " [syntax]',
    ),
    (
        "two objects",
        '{"train_batch_size": 8} {}',
        "f.json:1:25: error: text after the end of the file's object: '{}'; check the brackets [syntax]",
    ),
    (
        "list at the top",
        "[8]",
        "f.json:1:1: error: the top of the file must be an object {...} [type]",
    ),
    (
        "nothing",
        '{"train_batch_size": }',
        "f.json:1:22: error: expected a value, found '}' [syntax]",
    ),
    (
        "file of Accelerate",
        '{"distributed_type": "DEEPSPEED"}',
        "f.json:1:1: error: this is a configuration for Hugging Face Accelerate; check the file that its deepspeed_config_file names [other-tool]",
    ),
    (
        "no effect: stage 3 key",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}',
        "f.json:1:59: warning: zero_optimization.stage3_max_live_parameters: has no effect at stage 2; use stage 3, or remove it [no-effect]",
    ),
    (
        "no effect: parameter offload",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
        "f.json:1:59: warning: zero_optimization.offload_param: has no effect at stage 2: nothing is offloaded; it needs stage 3 [no-effect]",
    ),
    (
        "no effect: optimizer offload",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}',
        "f.json:1:59: warning: zero_optimization.offload_optimizer: has no effect at stage 0: nothing is offloaded; it needs stage 1, 2 or 3 [no-effect]",
    ),
    (
        "no effect: NVMe at stage 2",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}',
        'f.json:1:91: warning: zero_optimization.offload_optimizer.device: "nvme" has no effect at stage 2: DeepSpeed silently offloads to the CPU; write "cpu", or use stage 3 [no-effect]',
    ),
    (
        "no effect: no stage",
        '{"train_batch_size": 8, "zero_optimization": {"overlap_comm": true}}',
        'f.json:1:25: warning: zero_optimization: "stage" is absent: it is 0, and ZeRO is off; write "stage": 1, 2 or 3 [no-effect]',
    ),
    (
        "deprecated: switch",
        '{"train_batch_size": 8, "zero_optimization": true}',
        'f.json:1:46: warning: zero_optimization: true is deprecated and means stage 1; write {"stage": 1} [deprecated]',
    ),
    (
        "deprecated: offload",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        'f.json:1:59: warning: zero_optimization.cpu_offload: deprecated; write "offload_optimizer": {"device": "cpu"} [deprecated]',
    ),
    (
        "deprecated: bfloat16",
        '{"train_batch_size": 8, "bfloat16": {"enabled": true}}',
        'f.json:1:25: warning: bfloat16: deprecated; write "bf16" [deprecated]',
    ),
    (
        "coerced number",
        '{"train_batch_size": 8, "zero_optimization": {"stage": "2"}}',
        'f.json:1:56: warning: zero_optimization.stage: DeepSpeed reads "2" as 2; write 2 [coerced]',
    ),
    (
        "coerced switch",
        '{"train_batch_size": 8, "fp16": {"enabled": "yes"}}',
        'f.json:1:45: warning: fp16.enabled: DeepSpeed reads "yes" as true; write true [coerced]',
    ),
    (
        "torch schedule with ZeRO",
        '{"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"step_size": 5}}, "zero_optimization": {"stage": 1}}',
        "f.json:1:47: warning: scheduler.type: works in dsframe only: torch's StepLR does not accept a ZeRO optimizer, so plain DeepSpeed raises; for plain DeepSpeed choose one of its own, such as WarmupLR [portability]",
    ),
    (
        "warm-up longer than training",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}',
        "f.json:1:94: warning: scheduler.params.total_num_steps: total_num_steps 100 is less than warmup_num_steps 1000, its default: training ends during the warm-up; raise the first or lower the second [schedule]",
    ),
]


def test_table_is_long_enough() -> None:
    assert len(MISTAKES) >= 60
    assert len({name for name, _, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(("text", "message"), [pair[1:] for pair in MISTAKES], ids=[pair[0] for pair in MISTAKES])
def test_message(text: str, message: str) -> None:
    found = [str(problem) for problem in examine(text, "f.json").problems if problem.severity != "note"]
    assert found == [message]
