"""Every name inside DeepSpeed that dsframe reads, sets or calls beyond its public interface, and what it must mean.

A new release is read by this table: each file, name by name. ``tests/unit/test_internals.py`` has that nothing is used which is
not here, and that each name is where the table says. The meaning is proven by the contract (``tests/engines/test_contract.py``),
by ``tests/engines/test_patches.py`` and by the matrices of ``make equivalence`` and ``make portability``.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from dsframe.errors import EngineError

INTERNALS: dict[str, dict[str, str]] = {
    "runtime/engine.py": {
        "basic_optimizer": "torch's own optimizer, inside of all wrappers",
        "_backward_prologue": "called once a backward pass: divides the loss by the accumulation steps",
        "_backward_prologue_per_tensor": "the same, for each output that a derivative is taken of",
        "_global_grad_norm": "norm of the global gradient before clipping, of the last update",
        "get_global_grad_norm": "returns it",
        "clip_fp32_gradients": "stage 0 in fp32: clips, and keeps the norm",
        "bfloat16_enabled": "the model is in bf16",
        "fp16_enabled": "the model is in fp16",
        "has_moe_layers": "some parameters belong to groups of experts",
        "expert_parallel_group": "groups of ranks that share experts, by name",
        "is_gradient_accumulation_boundary": "the next step() updates",
        "was_step_applied": "the last step() updated, and skipped nothing",
        "global_steps": "updates, skipped ones too",
        "global_samples": "samples of all ranks",
        "micro_steps": "backward passes of this rank",
        "mpu": "the program's model-parallel groups, or None",
        "destroy": "removes hooks and gives memory back",
    },
    "runtime/pipe/engine.py": {
        "_exec_schedule": "runs the instructions of one batch",
        "_inference_schedule": "those of an evaluation",
        "_compute_loss": "whether the last stage computes the loss",
        "_reentrant_activation_checkpointing": "recomputation by torch's older way",
        "dp_group_loss": "last stage: mean loss of the batch over the replicas",
        "dynamic_shape": "sizes of activations may change between micro-batches",
        "reset_activation_shape": "sizes are sent anew before the next batch",
        "grid": "who is in which stage and replica",
        "is_last_stage": "this rank computes the loss",
        "set_dataiterator": "gives the micro-batches of one batch",
        "train_batch": "trains one batch; returns the mean loss on every rank",
    },
    "runtime/pipe/module.py": {
        "activation_checkpoint_func": "called for each interval of layers that is recomputed",
        "tied_modules": "layers that several stages have, by name",
        "ds_pipe_replicated": "a tied parameter that another stage counts in the norm",
    },
    "runtime/pipe/topology.py": {
        "get_model_parallel_group": "ranks that hold parts of one copy of a layer",
        "get_pipe_parallel_group": "ranks of one pipeline",
        "pp_group": "ranks of one pipeline, or None where there is one stage",
    },
    "runtime/zero/stage3.py": {
        "fp16_groups": "parameters by sub-group, as they lie in the flat tensors",
        "fp32_partitioned_groups_flat": "this rank's masters of a sub-group, one after another, padded",
        "grad_position": "id of a parameter -> sub-group, first element there, number with padding",
        "get_param_id": "that id",
        "grad_partitions_flat_buffer": "this rank's gradients, all sub-groups",
        "partition_grads": "adds reduced gradients to it",
        "persistent_parameters": "parameters that every rank keeps whole between steps",
        "parameter_offload": "the hooks that gather and release",
        "_fp32_state_allgather": "gathers this rank's piece of a master or moment to the whole",
        "_get_param_partition_rank": "which piece of a parameter this rank has",
        "_partition_all_parameters": "releases what is gathered",
        "_reassign_or_swap_out_partitioned_parameters": "masters of a sub-group -> the model's own pieces",
        "_swappable_optimizer_subgroup": "a sub-group's state lies on NVMe",
        "_optimizer_states_and_gradient_swap_in": "reads it",
        "_optimizer_states_and_gradient_swap_out": "writes it",
        "_release_swap_buffers": "lets it go unwritten",
    },
    "runtime/zero/stage_1_and_2.py": {
        "bit16_groups": "parameters by group, as they lie in the flat tensors",
        "overflow": "gradients of this step were not finite",
        "scaled_global_norm": "norm of all groups' gradients, -1 where it is not finite",
        "_model_parallel_all_reduce": "adds up a group's square over the ranks that split the model",
        "_update_scale": "moves the loss scale after a step",
        "dynamic_loss_scale": "the scale moves",
        "loss_scaler": "what moves it",
        "gradient_accumulation_dtype": "dtype in which gradients are added up",
        "use_grad_accum_attribute": "they are added up beside .grad",
        "_fill_param_grad_accum_attribute": "does so for one parameter",
        "get_gradient_for_reduction": "returns what is reduced of a parameter",
        "setup_buckets": "empties the buckets",
        "reduce_ready_partitions_and_remove_grads": "called for each gradient as it comes",
        "independent_gradient_partition_epilogue": "called when all have come: reduces the rest",
        "partition_gradients": "stage 2, not 1",
        "clear_backward_seen_flag": "a backward pass has ended",
    },
    "runtime/bf16_optimizer.py": {
        "bf16_groups": "parameters by group, as they lie in the flat tensors",
        "update_lp_params": "masters -> model, gathered from all ranks",
    },
    "runtime/fp16/fused_optimizer.py": {
        "fp32_groups_flat": "masters of a group, one after another",
        "fp16_groups_flat": "the same in 16 bits, of which the model's parameters are views",
        "loss_scale_config": "the scale where no loss_scaler is",
    },
    "runtime/fp16/unfused_optimizer.py": {"fp32_groups": "a master for each parameter"},
    "runtime/fp16/loss_scaler.py": {
        "cur_scale": "the loss scale",
        "cur_iter": "steps so far",
        "cur_hysteresis": "overflows until it falls",
        "last_overflow_iter": "step of the last overflow",
    },
    "runtime/zero/parameter_offload.py": {
        "forward_hooks": "handles of what gathers before, and releases after, a module's forward pass",
        "backward_hooks": "the same of its backward pass",
        "fwd_pre_hook": "registers one",
        "get_param_coordinator": "who gathers ahead",
    },
    "runtime/zero/partitioned_param_coordinator.py": {
        "_invalidate_trace": "forgets the order of modules",
        "is_record_trace": "the order is being recorded",
    },
    "runtime/zero/partition_parameters.py": {
        "Init": "context: modules are made in pieces",
        "ds_tensor": "this rank's piece",
        "ds_shape": "shape of the whole",
        "ds_numel": "elements of the whole",
        "ds_id": "number of the parameter",
        "ds_status": "gathered, released or on its way",
        "ds_active_sub_modules": "modules that need it gathered now",
        "ds_process_group": "the ranks that it is cut among",
    },
    "runtime/sequence_parallel/ulysses_sp.py": {"ds_grad_is_ready": "False while a tiled layer has more to add"},
    "runtime/zero/muon/original_muon.py": {"ns_compute_dtype": "dtype of Muon's iteration"},
    "runtime/utils.py": {
        "model_parallel": "a parameter that is cut, and not counted twice in the norm",
        "tensor_model_parallel": "the same, by Megatron's name",
    },
    "utils/tensor_fragment.py": {
        "get_hp_fragment_address": "where a parameter's piece lies in this rank's flat tensor",
    },
    "utils/mixed_precision_linkage.py": {
        "_hp_mapping": "a parameter's piece on this rank, or None",
        "_dp_group": "the ranks that share its master",
    },
    "utils/groups.py": {
        "initialize": "makes the groups",
        "_get_expert_parallel_group": "ranks that share one set of experts",
        "get_tensor_model_parallel_group": "ranks that cut the same layers",
    },
    "ops/op_builder/fused_adam.py": {"cxx_args": "options of the C++ compiler"},
    "module_inject/auto_ep_layer.py": {
        "ep_rank": "which experts this rank has",
        "num_experts": "experts of a layer on all ranks",
        "num_local_experts": "those of this rank",
    },
    "module_inject/auto_ep_presets/base.py": {"_output_capturing_hooks_installed": "transformers records the routers' outputs"},
    "comm/comm.py": {"init_distributed": "takes over torch's process group"},
    "accelerator/real_accelerator.py": {"get_accelerator": "the device's interface"},
    "accelerator/abstract_accelerator.py": {"is_fp16_supported": "the device computes in fp16"},
}  # fmt: skip
"""File of DeepSpeed's package -> name -> what it must mean. Of names that several files have, one of them."""


def missing(folder: Path) -> list[str]:
    """The names that are no more where the table says, as ``FILE: NAME``. ``folder``: of DeepSpeed's package."""
    gone = []
    for file, names in INTERNALS.items():
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        pattern = r"\b(?:def|class) {0}\b|\b{0}\s*(?::[^=\n]*)?=|\b{0},|hasattr\(\w+, '{0}'\)"
        gone += [f"{file}: {name}" for name in names if not re.search(pattern.format(name), text)]
    return gone


def package() -> Path:
    """The folder of DeepSpeed's package, which need not be imported."""
    return Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed")))


def check(version: str) -> None:
    """For a release that nobody has tried. Raises EngineError where names have gone."""
    if gone := missing(package()):
        more = f" and {len(gone) - 3} more" * (len(gone) > 3)
        raise EngineError(
            f"DeepSpeed {version} has no longer what dsframe needs inside of it: {', '.join(gone[:3])}{more}; "
            "install deepspeed==0.19.8"
        )
