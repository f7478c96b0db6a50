# ruff: noqa: E501 - a table: one line for each case
"""Combinations, one by one: which key is named, and how serious it is. (The messages are in test_check_mistakes.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsframe.config.load import examine
from dsframe.config.rules import system


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def offload(device: str, **keys: Any) -> dict[str, Any]:
    return {"device": device, **keys}


def data(**keys: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, **keys}}


def ours(**keys: Any) -> dict[str, Any]:
    return {"dsframe": keys}


def cut(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size, **more}}


def spread(**more: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, **more}}


def llama(**model: Any) -> dict[str, Any]:
    return ours(task={"name": "causal-language-model", "model": {"model_type": "llama", **model}})


ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {}}}
CPU = {"offload_optimizer": {"device": "cpu"}}


def rule(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def course(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


HALVES = rule("Muon", muon_lr=0.02, adam_lr=3e-4)
HALF = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


def kept(evaluated: int | None = None, **keys: Any) -> dict[str, Any]:
    more = {} if evaluated is None else {"eval_every_steps": evaluated}
    return ours(task={"name": "language"}, checkpoints=keys, **more)


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    # Checkpoints
    ("the best by a metric", kept(5, every_steps=10, keep_best="bits_per_byte:min"), []),
    ("the best by no metric", kept(every_steps=10, keep_best="perplexity:min"), ["E conflict dsframe.checkpoints.keep_best"]),
    ("the best of those that are not evaluated", kept(4, every_steps=10, keep_best="loss:min"), ["W no-effect dsframe.checkpoints.keep_best"]),
    ("an end by no metric", ours(task={"name": "language"}, stop={"metric": "perplexity:min"}), ["E conflict dsframe.stop.metric"]),
    ("an end by a metric of a script's own task", ours(stop={"metric": "perplexity:min"}), []),
    ("hooks of a user", ours(hooks=["mine:Hooks"]), []),
    ("kept of one", kept(keep_best="loss:min", keep_every=7), ["W no-effect dsframe.checkpoints.keep_best", "W no-effect dsframe.checkpoints.keep_every"]),
    ("shards of nothing", kept(every_steps=10, form="sharded"), ["W no-effect dsframe.checkpoints.form"]),
    ("shards of ZeRO-1", {**kept(every_steps=10, form="sharded"), **zero(1)}, []),
    # ZeRO and offload
    ("stage 3 keys at stage 3", zero(3, stage3_max_live_parameters=5, sub_group_size=7), []),
    ("hpz below stage 3", zero(2, zero_hpz_partition_size=2), ["W no-effect zero_optimization.zero_hpz_partition_size"]),
    ("a stage 3 key at its default", zero(2, sub_group_size=1e9), []),
    ("no device", zero(2, offload_param=offload("none"), offload_optimizer=offload("none")), []),
    ("optimizer offload", zero(1, offload_optimizer=offload("cpu")), []),
    ("NVMe on a drive that is not there", zero(3, offload_param=offload("nvme", nvme_path="/no/such/drive")), ["W nvme-path zero_optimization.offload_param.nvme_path"]),
    ("NVMe path without NVMe", zero(3, offload_param=offload("cpu", nvme_path="/tmp")), ["W no-effect zero_optimization.offload_param.nvme_path"]),
    ("elastic checkpoint", zero(3, elastic_checkpoint=True), ["W no-effect zero_optimization.elastic_checkpoint"]),
    ("old stage 1", zero(1, legacy_stage1=True), ["E conflict zero_optimization.legacy_stage1"]),
    ("no gradient norm at stage 3", zero(3, compute_grad_norm=False), ["E conflict zero_optimization.compute_grad_norm"]),
    ("no gradient norm, no clipping", {"gradient_clipping": 0, **zero(1, compute_grad_norm=False)}, []),
    ("SuperOffload at stage 2", zero(2, offload_optimizer=offload("cpu", super_offload=True)), ["W no-effect zero_optimization.offload_optimizer.super_offload"]),
    ("allgather_size beside an object", {"allgather_size": 5, **zero(1)}, ["W no-effect allgather_size"]),
    # ZenFlow
    ("ZenFlow", zero(2, offload_optimizer=offload("cpu"), zenflow={}), []),
    ("ZenFlow offload without overlap", zero(2, offload_optimizer=offload("cpu"), zenflow={"offload": True}), ["E conflict zero_optimization.zenflow.offload"]),
    ("ZenFlow without an interval", zero(2, offload_optimizer=offload("cpu"), zenflow={"select_strategy": "step"}), ["E conflict zero_optimization.zenflow.select_strategy"]),
    ("ZenFlow with intervals crossed", zero(2, offload_optimizer=offload("cpu"), zenflow={"select_strategy": "step", "select_interval": 2, "update_interval": 4}), ["E conflict zero_optimization.zenflow.select_interval"]),
    # Switches and large batches
    ("tiling below stage 3", {**zero(2), **ours(model={"tiling": {"modules": ["*.expand"], "out_splits": 2}})}, ["W no-effect dsframe.model.tiling"]),
    ("tiling", {**zero(3), **ours(model={"tiling": {"modules": ["*.expand"], "out_splits": 2}})}, []),
    ("tiling into one tile", {**zero(3), **ours(model={"tiling": {"modules": ["*.expand"]}})}, ["W no-effect dsframe.model.tiling"]),
    ("tiling of nothing", {**zero(3), **ours(model={"tiling": {"modules": [], "in_splits": 2}})}, ["E conflict dsframe.model.tiling.modules"]),
    ("tiling inside of recomputed blocks", {**zero(3), **ours(model={"tiling": {"modules": ["*.expand"], "in_splits": 2}, "activation_checkpointing": ["Sequential"]})}, ["W no-effect dsframe.model.tiling"]),
    ("tiling with Muon", {"optimizer": {"type": "Muon", "params": {}}, **zero(3, reduce_scatter=False), **ours(model={"tiling": {"modules": ["*.expand"], "in_splits": 2}})}, ["E conflict dsframe.model.tiling"]),
    ("recomputation of the CNN", ours(model={"activation_checkpointing": True}), ["E conflict dsframe.model.activation_checkpointing"]),
    ("recomputation of no class", ours(model={"activation_checkpointing": []}), ["E conflict dsframe.model.activation_checkpointing"]),
    ("recomputation inside of one graph", ours(model={"activation_checkpointing": ["Sequential"], "compile": True}), ["E conflict dsframe.model.compile"]),
    ("recomputation of compiled blocks", ours(model={"activation_checkpointing": ["Sequential"], "compile": "blocks"}), []),
    ("DeepSpeed's section without blocks", {"activation_checkpointing": {"cpu_checkpointing": True}, **ours(steps=5)}, ["W no-effect activation_checkpointing"]),
    ("DeepSpeed's section with blocks", {"activation_checkpointing": {"cpu_checkpointing": True}, **ours(model={"activation_checkpointing": ["Sequential"]})}, []),
    ("one graph at stage 3", {**zero(3), **ours(model={"compile": True})}, ["W slow dsframe.model.compile"]),
    ("shared inputs of recomputed blocks", {"activation_checkpointing": {"partition_activations": True}, **cut(2), **ours(model={"activation_checkpointing": ["Block"]})}, []),
    ("shared inputs without ranks that have the same", {"activation_checkpointing": {"partition_activations": True}, **ours(model={"activation_checkpointing": ["Block"]})}, ["W no-effect activation_checkpointing.partition_activations"]),
    ("recomputed blocks under nn.DataParallel", ours(engine="reference-dataparallel", model={"activation_checkpointing": ["Sequential"]}), ["E conflict dsframe.model.activation_checkpointing"]),
    ("one graph in a pipeline", {"pipeline": {"stages": 2}, **ours(model={"compile": True})}, ["E conflict dsframe.model.compile"]),
    ("one graph, where there are no stages", {"pipeline": {"stages": 2}, **ours(engine="ddp", model={"compile": True})}, []),
    ("one graph in pieces", {"pipeline": {"stages": 2}, **ours(engine="reference-model-parallel", model={"compile": True})}, ["E conflict dsframe.model.compile"]),
    ("whole gradients at stage 1", {**zero(1), **ours(deepspeed={"accumulate": "whole"})}, ["W no-effect dsframe.deepspeed.accumulate"]),
    ("whole gradients", {**zero(2), **ours(deepspeed={"accumulate": "whole"})}, []),
    ("channels last in a language model", ours(task={"name": "language"}, model={"channels_last": True}), ["E conflict dsframe.model.channels_last"]),
    ("a large batch", ours(large_batch={"lr_scaling": "linear", "reference_batch_size": 4}), []),
    ("a large batch without reference", ours(large_batch={"lr_scaling": "sqrt"}), ["E missing dsframe.large_batch.lr_scaling"]),
    ("a large batch, not scaled", ours(large_batch={"reference_batch_size": 4}), ["W no-effect dsframe.large_batch.reference_batch_size"]),
    ("a large batch under adasum", ours(large_batch={"lr_scaling": "linear", "reference_batch_size": 4}, horovod={"op": "adasum"}), ["E conflict dsframe.large_batch.lr_scaling"]),
    # Reduction
    ("sum with ZenFlow", {"gradient_allreduce_op": "sum", **zero(2, offload_optimizer=offload("cpu"), zenflow={})}, ["E conflict gradient_allreduce_op"]),
    ("sum", {"gradient_allreduce_op": "sum", **zero(2)}, []),
    ("predivide at stage 2 by all-reduce", {"gradient_predivide_factor": 2.0, **zero(2, reduce_scatter=False)}, []),
    ("predivide with prescale", {"gradient_predivide_factor": 2.0, "prescale_gradients": True}, ["W no-effect gradient_predivide_factor"]),
    ("unmanaged with a pipeline", {"managed_gradient_accumulation": False, "pipeline": {"stages": 2}}, ["E conflict managed_gradient_accumulation"]),
    # Splitting the model
    ("pipeline with ZeRO-1", {"pipeline": {"stages": 2}, **zero(1)}, []),
    ("pipeline partition", {"pipeline": {"partition": "layers"}}, ["E conflict pipeline.partition"]),
    ("pipeline partition by type", {"pipeline": {"partition": "type:Block"}}, []),
    ("pipeline partition by no expression", {"pipeline": {"partition": "type:("}}, ["E conflict pipeline.partition"]),
    ("an interval without stages", {"pipeline": {"activation_checkpoint_interval": 2}}, ["W no-effect pipeline.activation_checkpoint_interval"]),
    ("more stages than layers", {"pipeline": {"stages": 6}, **ours(steps=5)}, ["E conflict pipeline.stages"]),
    ("as many stages as layers", {"pipeline": {"stages": 6}, **ours(task={"name": "language", "layers": 2})}, []),
    ("more stages than layers, where there are none", {"pipeline": {"stages": 6}, **ours(engine="ddp")}, []),
    ("stages by a class that is not there", {"pipeline": {"stages": 2, "partition": "type:Block"}, **ours(steps=5)}, ["E conflict pipeline.partition"]),
    ("stages by a class that is there", {"pipeline": {"stages": 2, "partition": "type:block|x"}, **ours(task={"name": "language"})}, []),
    ("stages of what is no chain", {"pipeline": {"stages": 2}, **ours(task={"model": "googlenet"})}, ["E conflict pipeline.stages"]),
    ("stages of transformers", {"pipeline": {"stages": 2}, **ours(task={"name": "causal-language-model", "model": {"model_type": "llama"}})}, []),
    ("pieces of transformers", {"pipeline": {"stages": 2}, **llama(), "dsframe": {**llama()["dsframe"], "engine": "reference-model-parallel"}}, ["E conflict pipeline.stages"]),
    ("more pieces than layers", {"pipeline": {"stages": 6}, **ours(engine="reference-model-parallel")}, ["E conflict pipeline.stages"]),
    ("a weight of two pieces", {"pipeline": {"stages": 2}, **ours(engine="reference-model-parallel", task={"name": "language"})}, ["E conflict dsframe.task.tie_embeddings"]),
    ("no weight of two pieces", {"pipeline": {"stages": 2, "partition": "type:Nothing"}, **ours(engine="reference-model-parallel", task={"name": "language", "tie_embeddings": False})}, []),
    ("recomputed twice", {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}, **ours(task={"name": "language"}, model={"activation_checkpointing": True})}, ["E conflict pipeline.activation_checkpoint_interval"]),
    ("group size beside autotp_size", {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, ["E conflict tensor_parallel.tp.tp_size"]),
    ("an unknown preset", {"tensor_parallel": {"autotp_size": 2, "preset_model": "gpt9"}}, ["E conflict tensor_parallel.preset_model"]),
    ("a preset in capitals", {"tensor_parallel": {"autotp_size": 2, "preset_model": "Llama"}}, []),
    ("experts are placement for replicas", {"expert_parallel": {"enabled": True, "autoep_size": 2}, **ours(engine="ddp", task={"name": "language"})}, []),
    ("experts over ranks", spread(), []),
    ("experts of their own optimizer state", {**spread(), **rule("AdamW"), **zero(3, **CPU)}, []),
    ("experts that score otherwise", spread(score_func="sigmoid"), ["E conflict expert_parallel.score_func"]),
    ("replicas' experts that score otherwise", {**spread(top_k=1), **ours(engine="ddp")}, ["E conflict expert_parallel.top_k"]),
    ("experts by other names", spread(expert_w1="gate"), ["E conflict expert_parallel.expert_w1"]),
    ("experts by other names, of replicas", {**spread(expert_w1="gate"), **ours(engine="ddp")}, []),
    ("experts that are shared out themselves", spread(expert_tensor_parallel_size=2), ["E conflict expert_parallel.expert_tensor_parallel_size"]),
    ("experts in a pipeline", {**spread(), "pipeline": {"stages": 2}}, ["E conflict expert_parallel.autoep_size"]),
    ("experts and tensor parallelism", {**spread(), "tensor_parallel": {"autotp_size": 2}}, ["E conflict expert_parallel.autoep_size"]),
    ("experts and sequence parallelism", {**spread(), "sequence_parallel_size": 2}, ["E conflict expert_parallel.autoep_size"]),
    ("experts by Lamb", {**spread(), "optimizer": {"type": "lamb", "params": {}}}, ["E conflict expert_parallel.autoep_size"]),
    ("experts' gradients in sums", {**spread(), "gradient_allreduce_op": "sum"}, ["E conflict expert_parallel.autoep_size"]),
    ("experts in bf16 without ZeRO", {**spread(), "bf16": {"enabled": True}}, ["E conflict expert_parallel.autoep_size"]),
    ("experts in bf16", {**spread(), "bf16": {"enabled": True}, **zero(1)}, []),
    ("experts and an adapter", {**spread(), **ours(adapter={"type": "lora", "target_modules": ["q_proj"]})}, ["E conflict expert_parallel.autoep_size"]),
    ("experts compiled", {**spread(), **ours(model={"compile": "blocks"})}, ["E conflict expert_parallel.autoep_size"]),
    ("experts and scattered gradients", {**spread(), **zero(2, contiguous_gradients=False)}, ["E conflict zero_optimization.contiguous_gradients"]),
    ("experts and all-reduced gradients", {**spread(), **zero(1, reduce_scatter=False)}, ["E conflict zero_optimization.reduce_scatter"]),
    ("experts and hpZ", {**spread(), **zero(3, zero_hpz_partition_size=2)}, ["E conflict zero_optimization.zero_hpz_partition_size"]),
    ("experts and quantised gradients", {**spread(), **zero(3, zero_quantized_gradients=True)}, ["E conflict zero_optimization.zero_quantized_gradients"]),
    ("experts and tiles", {**spread(), **zero(3), **ours(model={"tiling": {"modules": ["*.q_proj"], "out_splits": 2}})}, ["E conflict dsframe.model.tiling"]),
    ("DeepEP without a budget", {"expert_parallel": {"enabled": True, "comm_backend": "deepep"}}, ["E conflict expert_parallel.comm_backend"]),
    ("DeepCompile without ZeRO", {"compile": {"deepcompile": True}}, ["W no-effect compile.deepcompile"]),
    ("two offloads of DeepCompile", {"compile": {"offload_parameters": True, "offload_opt_states": True}}, ["E conflict compile.offload_parameters"]),
    # Number formats
    ("bf16 moments without bf16 weights", {"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(1)}, ["E conflict bf16.bf16_optimizer_states"]),
    ("loss-scale window", {"fp16": {"enabled": True, "loss_scale_window": 0}}, ["E conflict fp16.loss_scale_window"]),
    ("loss-scale window, static scale", {"fp16": {"enabled": True, "loss_scale": 8, "loss_scale_window": 0}}, []),
    ("parameter type", {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bfloat16"}}, []),
    ("fp32 gradients for bf16", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, []),
    # Optimizer and schedule
    ("SGD allowed", {"optimizer": {"type": "SGD", "params": {}}, "zero_allow_untested_optimizer": True, **zero(2)}, []),
    ("Adafactor in flat shares", {**ADAFACTOR, "zero_allow_untested_optimizer": True, **zero(1)}, ["E conflict optimizer.type"]),
    ("Adafactor without ZeRO", ADAFACTOR, []),
    ("all that Horovod would tune is fixed", ours(engine="horovod", horovod={"autotune": True, "fusion_threshold_bytes": 1024, "cycle_time_milliseconds": 5}), ["W no-effect dsframe.horovod.autotune"]),
    ("one thing left to tune", ours(engine="horovod", horovod={"autotune": True, "cycle_time_milliseconds": 5}), []),
    ("MLflow that is off", ours(mlflow={"experiment": "e"}), ["W no-effect dsframe.mlflow.experiment"]),
    ("Adafactor, where nothing is shared out", {**ADAFACTOR, "zero_allow_untested_optimizer": True, **zero(3), **ours(engine="horovod")}, []),
    ("Lamb with dynamic scaling", {"optimizer": {"type": "lamb", "params": {}}, "fp16": {"enabled": True}}, []),
    ("Muon's halves in proportion", {**HALVES, **course("WarmupCosineLR", total_num_steps=10, warmup_num_steps=2)}, []),
    ("Muon's halves, each up to its own rate", {**HALVES, **course("WarmupLR")}, []),
    ("Muon's halves, each up to its own rate by auto", {**HALVES, **course("WarmupLR", warmup_max_lr="auto")}, []),
    ("Muon's halves down from one rate by auto", {**HALVES, **course("WarmupDecayLR", total_num_steps=5000, warmup_max_lr="auto")}, ["E conflict scheduler.type"]),
    ("muP's rates, each reached by auto", {**rule("MuAdam", lr=0.1), **course("WarmupLR", warmup_max_lr="auto")}, []),
    ("Muon's halves at one rate of the schedule's", {**HALVES, **course("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2)}, ["E conflict scheduler.type"]),
    ("Muon's halves up to one rate", {**HALVES, **course("WarmupLR", warmup_max_lr=0.1)}, ["E conflict scheduler.type"]),
    ("Muon's halves down to one rate", {**HALVES, **course("CosineAnnealingLR", T_max=9, eta_min=0.1)}, ["E conflict scheduler.type"]),
    ("Muon's halves as they are by default", {**rule("Muon"), **course("WarmupDecayLR", total_num_steps=5000)}, ["E conflict scheduler.type"]),
    ("one rate for Muon", {**rule("Muon", lr=0.1), **course("WarmupDecayLR", total_num_steps=5000)}, ["W schedule scheduler.params"]),
    ("a rate that the schedule replaces", {**rule("AdamW", lr=5e-7), **course("WarmupDecayLR", total_num_steps=5000)}, ["W schedule scheduler.params"]),
    ("rates by muP's widths", {**rule("MuAdam", lr=0.1), **course("WarmupDecayLR", total_num_steps=5000)}, ["E conflict scheduler.type", "W schedule scheduler.params"]),
    ("Muon and reduce-scatter", {**rule("Muon", lr=0.1), **zero(3)}, ["E conflict optimizer.type"]),
    ("Muon without reduce-scatter", {**rule("Muon", lr=0.1), **zero(3, reduce_scatter=False)}, []),
    ("Muon at the Adam half's own rate", {**rule("Muon", muon_lr=3e-4), **course("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2)}, []),
    ("masters that are not half", {**rule("AdamW"), "bf16": {"enabled": False, "bf16_master_weights_and_grads": True}, **zero(1, **CPU), **ours(engine="ddp")}, []),
    ("autocast as the device has it", {"torch_autocast": {"enabled": True}}, []),
    ("gradients in turns", zero(2, round_robin_gradients=True), []),
    ("gradients in turns, of replicas", {**zero(2, round_robin_gradients=True), **ours(engine="ddp")}, []),
    ("Muon in flat shares", {**rule("Muon", lr=0.1), **zero(1)}, ["E conflict optimizer.type"]),
    ("Muon in flat shares on the CPU", {**rule("Muon", lr=0.1), **zero(1, **CPU)}, []),
    ("Muon head by head", rule("Muon", lr=0.1, per_head_muon=True), []),
    ("no bias correction by torch's Adam", {**rule("AdamW", bias_correction=False), **ours(engine="horovod")}, ["E conflict optimizer.params.bias_correction"]),
    ("no bias correction by DeepSpeed's", rule("AdamW", bias_correction=False), []),
    ("no bias correction on the CPU", {**rule("AdamW", bias_correction=False), **HALF, **zero(1, **CPU)}, []),
    ("gradients dropped", rule("AdamW", set_grad_none=True), []),
    ("gradients dropped on the CPU", {**rule("AdamW", set_grad_none=True), **HALF, **zero(1, **CPU)}, ["E conflict optimizer.params.set_grad_none"]),
    ("gradients dropped on the CPU by request", {**rule("AdamW", set_grad_none=True, torch_adam=False), **zero(1, **CPU)}, ["E conflict optimizer.params.set_grad_none"]),
    ("half the masters without a CPU", {**rule("AdamW"), **HALF, **zero(1)}, ["E conflict bf16.bf16_master_weights_and_grads"]),
    ("half the masters and the moments", {**rule("AdamW"), "bf16": {**HALF["bf16"], "bf16_optimizer_states": True}, **zero(1)}, []),
    ("half the masters on the CPU", {**rule("AdamW"), **HALF, **zero(1, **CPU)}, []),
    ("half the masters by torch's Adam", {**rule("AdamW", torch_adam=True), **HALF, **zero(1, **CPU)}, ["E conflict bf16.bf16_master_weights_and_grads"]),
    ("half the masters by another optimizer", {**rule("Adagrad"), **HALF, **zero(1, **CPU)}, ["E conflict bf16.bf16_master_weights_and_grads"]),
    ("ZenFlow by torch's Adam", {**rule("AdamW", torch_adam=True), **zero(1, zenflow={}, **CPU)}, ["E conflict zero_optimization.zenflow"]),
    ("mup takes what it is given", {"optimizer": {"type": "MuAdam", "params": {"anything": 1}}}, []),
    ("a schedule with everything", {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}}, []),
    ("a schedule from its midst", course("WarmupLR", last_batch_iteration=5), ["E conflict scheduler.params.last_batch_iteration"]),
    ("torch's from its midst", course("StepLR", step_size=2, last_epoch=0), ["E conflict scheduler.params.last_epoch"]),
    ("a schedule from its start", course("WarmupLR", last_batch_iteration=-1), []),
    ("a list of one rate", course("WarmupLR", warmup_max_lr=[1e-3], warmup_min_lr=[0.0]), []),
    ("a list of rates", course("LRRangeTest", lr_range_test_min_lr=[1e-3, 1e-4]), ["E conflict scheduler.params.lr_range_test_min_lr"]),
    ("milestones", course("MultiStepLR", milestones=[1, 2]), []),
    ("what dsframe makes itself is not passed on", {"optimizer": {"type": "SGD", "params": {"new": 1}}, **ours(pass_through=["optimizer.params.new"])}, ["E conflict dsframe.pass_through"]),
    ("torch's schedule without ZeRO", {"scheduler": {"type": "StepLR", "params": {"step_size": 2}}}, []),
    # Engines
    ("PowerSGD", ours(ddp={"communication": "power_sgd", "power_sgd_rank": 2}), ["W resume dsframe.ddp.communication"]),
    ("small buckets of what is compiled", ours(engine="ddp", model={"compile": "blocks"}, ddp={"bucket_cap_megabytes": 0.5}), ["E conflict dsframe.ddp.bucket_cap_megabytes"]),
    ("the smallest buckets of what is compiled", ours(engine="ddp", model={"compile": True}, ddp={"bucket_cap_megabytes": 1}), []),
    ("small buckets", ours(engine="ddp", ddp={"bucket_cap_megabytes": 0.5}), []),
    ("small buckets of DDP's elsewhere", ours(engine="fsdp", model={"compile": "blocks"}, ddp={"bucket_cap_megabytes": 0.5}), []),
    ("PowerSGD in fp16", {"fp16": {"enabled": True}, **ours(ddp={"communication": "power_sgd"})}, ["E conflict dsframe.ddp.communication", "W resume dsframe.ddp.communication"]),
    ("PowerSGD under autocast to fp16", {"torch_autocast": {"enabled": True, "dtype": "fp16"}, **ours(ddp={"communication": "power_sgd"})}, ["E conflict dsframe.ddp.communication", "W resume dsframe.ddp.communication"]),
    ("PowerSGD under autocast to whatever the device likes", {"torch_autocast": {"enabled": True}, **ours(ddp={"communication": "power_sgd"})}, ["W portability dsframe.ddp.communication", "W resume dsframe.ddp.communication"]),
    ("PowerSGD under autocast to bf16", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **ours(ddp={"communication": "power_sgd"})}, ["W resume dsframe.ddp.communication"]),
    ("PowerSGD and skipping", ours(on_nonfinite="skip", ddp={"communication": "power_sgd"}), ["E conflict dsframe.ddp.communication", "W resume dsframe.ddp.communication"]),
    ("PowerSGD too early", ours(ddp={"communication": "power_sgd", "power_sgd_start_step": 1}), ["E range dsframe.ddp.power_sgd_start_step"]),
    ("a rank without PowerSGD", ours(ddp={"power_sgd_rank": 2}), ["W no-effect dsframe.ddp.power_sgd_rank"]),
    ("a shard size without hybrid sharding", ours(engine="fsdp", fsdp={"shard_size": 2}), ["W no-effect dsframe.fsdp.shard_size"]),
    # Data
    ("dynamic batching without a budget", data(data_sampling={"enabled": True, "dynamic_batching": {"enabled": True}}), ["E conflict data_efficiency.data_sampling.dynamic_batching"]),
    ("sampling inside what is off", {"data_efficiency": {"data_sampling": {"enabled": True}}}, ["W no-effect data_efficiency.data_sampling"]),
    ("dropping inside what is off", data(data_routing={"random_ltd": {"enabled": True}}), ["W no-effect data_efficiency.data_routing.random_ltd"]),
    # Names of other tools, taken for what they mean
    ("name for type", {"optimizer": {"name": "Adam", "params": {"lr": "x"}}}, ["E unknown-key optimizer.name", "E type optimizer.params.lr"]),
    ("zero for zero_optimization", {"zero": {"stage": 7}}, ["E unknown-key zero", "E value zero.stage"]),
    ("auto for the stage", zero("auto"), ["W no-effect zero_optimization.stage"]),  # type: ignore[arg-type]
    # The rest
    ("an empty folder", {"autotuning": {"results_dir": ""}}, ["E conflict autotuning.results_dir"]),
    ("a writer that fails", {"checkpoint": {"writer": {"type": "python"}}}, ["W broken checkpoint.writer.type"]),
    ("comet without its package", {"comet": {"enabled": True}}, ["W not-installed comet.enabled"]),
    # Ours
    ("workers for data in memory", ours(task={"workers": 2}), ["W no-effect dsframe.task.workers"]),
    ("image size of synthetic data", ours(task={"dataset": "synthetic", "image_size": 8, "classes": 3}), []),
    # Tensor parallelism
    ("heads and ranks", {**cut(3), **ours(task={"name": "language", "heads": 4})}, ["E conflict dsframe.task.heads"]),
    ("heads that divide", {**cut(2), **ours(task={"name": "language", "heads": 4})}, []),
    ("heads of a Llama", {**cut(4), **llama(num_attention_heads=4, num_key_value_heads=2)}, ["E conflict dsframe.task.model.num_key_value_heads"]),
    ("stages that nobody shards", {**cut(2), "pipeline": {"stages": 2}, **llama(num_attention_heads=4)}, ["E conflict tensor_parallel.autotp_size"]),
    ("nothing says how", {**cut(2), **llama(model_type="gpt2")}, ["E conflict tensor_parallel.autotp_size"]),
    ("how a CNN is cut", {**cut(2), **ours(task={"model": "cnn"})}, ["E conflict tensor_parallel.autotp_size"]),
    ("how a program's own task is cut", cut(2), []),
    ("the file says how", {**cut(2, partition_config={"layer_specs": [{"patterns": [".*"]}]}), **llama(model_type="gpt2")}, []),
    ("an optimizer of whole weights", {**cut(2), **llama(), **ADAFACTOR}, ["E conflict tensor_parallel.autotp_size"]),
    ("Lamb of shares", {**cut(2), **llama(), "optimizer": {"type": "Lamb", "params": {}}}, ["E conflict tensor_parallel.autotp_size"]),
    ("nothing is cut by ddp", {**cut(3), **ADAFACTOR, "bf16": {"enabled": True}, **ours(engine="ddp", task={"model": "cnn"})}, []),
    ("bf16 without ZeRO", {**cut(2), **llama(), "bf16": {"enabled": True}}, ["E conflict tensor_parallel.autotp_size"]),
    ("bf16 with ZeRO", {**cut(2), **llama(), "bf16": {"enabled": True}, **zero(1)}, []),
    ("sequence parallel as well", {**cut(2), **llama(), "sequence_parallel_size": 2}, ["E conflict tensor_parallel.autotp_size"]),
    # Sequence parallelism
    ("heads and slices", {"sequence_parallel_size": 3, **ours(task={"name": "language", "heads": 4, "context": 96})}, ["E conflict dsframe.task.heads"]),
    ("positions and slices", {"sequence_parallel_size": 2, **ours(task={"name": "language", "heads": 4, "context": 33})}, ["E conflict dsframe.task.context"]),
    ("sequences that are shared", {"sequence_parallel_size": 2, **ours(task={"name": "language", "heads": 4})}, []),
    ("slices of pictures", {"sequence_parallel_size": 2, **ours(task={"model": "cnn"})}, ["E conflict sequence_parallel_size"]),
    ("slices for a Llama", {"sequence_parallel_size": 2, **llama(num_attention_heads=4)}, []),
    ("slices and a Llama's heads", {"sequence_parallel_size": 3, **llama(num_attention_heads=4)}, ["E conflict dsframe.task.context", "E conflict dsframe.task.model.num_attention_heads"]),
    ("slices for a task of somebody's", {"sequence_parallel_size": 2, **ours(task={"name": "circles:Circles"})}, []),
    ("slices through stages", {"sequence_parallel_size": 2, "pipeline": {"stages": 2}, **ours(task={"name": "language"})}, ["E conflict sequence_parallel_size"]),
    ("slices summed", {"sequence_parallel_size": 2, "gradient_allreduce_op": "sum"}, ["E conflict sequence_parallel_size"]),
    ("slices in a compiled block", {"sequence_parallel_size": 2, **ours(task={"name": "language"}, model={"compile": "blocks"})}, ["E conflict sequence_parallel_size"]),
    ("a width for slices' gradients", {"sequence_parallel_size": 2, "seq_parallel_communication_data_type": "fp32"}, ["W no-effect seq_parallel_communication_data_type"]),
    ("nothing is shared by ddp", {"sequence_parallel_size": 3, "pipeline": {"stages": 2}, **ours(engine="ddp", task={"model": "cnn"})}, []),
    ("a loss of its own", {**cut(2, vocab_parallel_lm_head=True), **llama()}, ["E conflict tensor_parallel.vocab_parallel_lm_head"]),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rule(keys: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = examine(json.dumps({"train_batch_size": 8, **keys}), "x.json").problems
    found = [f"{p.severity[0].upper()} {p.code} {p.path}" for p in problems if p.severity != "note"]
    assert found == expected


def test_a_file_that_names_code_says_so() -> None:
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "mine:Fast", "params": {"lr": 0.1}},
        "scheduler": {"type": "LambdaLR", "params": {"lr_lambda": "mine:rate"}},
        "dsframe": {"engine": "single", "task": {"name": "circles:Circles"}},
    }
    said = [problem for problem in examine(json.dumps(content), "x.json").problems if problem.code == "imports"]
    assert {(p.severity, p.path, p.message) for p in said} == {
        ("note", "dsframe.task.name", "imports and runs code: circles"),
        ("note", "optimizer.type", "imports and runs code: mine"),
        ("note", "scheduler.params.lr_lambda", "imports and runs code: mine"),
    }


def test_gpu_direct_storage_needs_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8, "aio": {"use_gds": True}})
    monkeypatch.setattr(system, "NVIDIA_DRIVER", tmp_path / "absent")
    assert [problem.path for problem in examine(text, "x.json").problems] == ["aio.use_gds"]
    monkeypatch.setattr(system, "NVIDIA_DRIVER", tmp_path)
    assert examine(text, "x.json").problems == ()
