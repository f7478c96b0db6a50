"""The verdict on each of 113 public ds_config files: what they are called wrong for, and for nothing else.

The files are not part of the repository (they have licences of their own). They are expected beside it, in shared/; their
numbers are the first part of their names.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dsframe.config.load import examine

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "public_ds_configs"

CLEAN = [
    "001",
    "003",
    "011",
    "023",
    "024",
    "026",
    "034",
    "035",
    "036",
    "045",
    "046",
    "055",
    "056",
    "057",
    "058",
    "059",
    "060",
    "061",
    "062",
    "063",
    "064",
    "065",
    "066",
    "067",
    "068",
    "069",
    "093",
    "094",
    "095",
    "096",
    "097",
    "098",
    "099",
    "100",
    "101",
    "102",
    "105",
    "106",
    "108",
    "110",
    "111",
    "112",
    "114",
    "115",
    "116",
    "117",
    "119",
    "122",
    "124",
    "125",
    "126",
    "128",
    "129",
    "130",
    "131",
    "137",
    "138",
    "139",
    "140",
    "141",
    "170",
    "172",
    "173",
    "174",
    "182",
    "183",
    "184",
    "185",
    "187",
    "207",
    "208",
    "213",
    "220",
    "221",
]
"""No error, no warning."""

# Templates whose placeholders are filled in by a program.
_SIZES = ("E type train_batch_size", "E type train_micro_batch_size_per_gpu", "E type steps_per_print")
_STAGE = ("E type zero_optimization.stage", "E type prescale_gradients")
_BITS = ("E type fp16.enabled", "E type bf16.enabled")
_CURRICULUM = ("E removed curriculum_learning",)
VERDICTS: dict[str, tuple[str, ...]] = {
    "005": ("E unknown-key disable_fused_adam",),
    "009": ("W deprecated zero_optimization",),
    "010": ("W deprecated zero_optimization",),
    "012": (
        "E type fp16.min_loss_scale",
        "E unknown-key fp16.fp16_scale_tolerance",
        "E unknown-key fp16.opt_level",
        "W no-effect zero_optimization.offload_param",
    ),
    "013": ("E unknown-key fp16.opt_level", "W no-effect zero_optimization.offload_param"),
    "014": ("E unknown-key fp16.opt_level", "W no-effect zero_optimization.offload_param"),
    "016": (
        "E unknown-key pipeline.pipeline_parallel_size",
        "E unknown-key pipeline.schedule",
        "E unknown-key pipeline.chunks",
        "E unknown-key pipeline.partition_method",
        "E unknown-key pipeline.pipeline_num_layers",
        "W no-effect zero_optimization.stage3_prefetch_bucket_size",
        "W no-effect zero_optimization.stage3_param_persistence_threshold",
    ),
    "019": (
        "E unknown-key bf16.loss_scale",
        "E unknown-key bf16.initial_scale_power",
        "E unknown-key bf16.loss_scale_window",
        "E unknown-key bf16.hysteresis",
        "E unknown-key bf16.min_loss_scale",
    ),
    "020": (
        "E unknown-key bf16.loss_scale",
        "E unknown-key bf16.initial_scale_power",
        "E unknown-key bf16.loss_scale_window",
        "E unknown-key bf16.hysteresis",
        "E unknown-key bf16.min_loss_scale",
    ),
    "021": ("E misplaced-key offload_optimizer",),
    "022": (
        "E unknown-key bf16.loss_scale",
        "E unknown-key bf16.initial_scale_power",
        "E unknown-key bf16.loss_scale_window",
        "E unknown-key bf16.hysteresis",
        "E unknown-key bf16.min_loss_scale",
    ),
    "025": (
        "E unknown-key bf16.loss_scale",
        "E unknown-key bf16.initial_scale_power",
        "E unknown-key bf16.loss_scale_window",
        "E unknown-key bf16.hysteresis",
        "E unknown-key bf16.min_loss_scale",
    ),
    "081": ("E batch ",),
    "104": ("E unknown-key optimizer.params.max_grad_norm", "E removed curriculum_learning"),
    "107": ("E removed curriculum_learning",),
    "113": ("W no-effect zero_optimization.offload_param", "E unknown-key backend"),
    "118": ("E removed eigenvalue", "E removed quantize_training"),
    "120": (
        "W no-effect zero_optimization.offload_param",
        "W no-effect zero_optimization.stage3_param_persistence_threshold",
    ),
    "121": ("W deprecated zero_optimization.cpu_offload",),
    "123": ("W no-effect disable_allgather",),
    "127": ("W deprecated zero_optimization.cpu_offload",),
    "132": ("W no-effect disable_allgather",),
    "133": ("W no-effect disable_allgather",),
    "134": ("E batch ",),
    "135": ("E batch ",),
    "136": ("E batch ",),
    "171": ("E unknown-key optimizer.params.max_grad_norm",),
    "175": (*_SIZES, *_STAGE, *_BITS, *_CURRICULUM),
    "176": (*_SIZES, *_BITS, *_CURRICULUM),
    "177": (*_SIZES, *_STAGE, *_BITS),
    "178": (*_SIZES, *_STAGE, *_BITS, *_CURRICULUM),
    "179": (*_SIZES, *_STAGE, *_BITS, *_CURRICULUM, "E removed compression_training"),
    "180": (*_SIZES, *_STAGE, *_CURRICULUM),
    "181": ("E unknown-key optimizer.params.max_grad_norm", "E removed curriculum_learning"),
    "186": ("W deprecated zero_optimization.cpu_offload",),
    "209": ("W deprecated zero_optimization.cpu_offload",),
    "210": ("W deprecated zero_optimization.cpu_offload",),
    "211": ("W deprecated zero_optimization.stage3_gather_fp16_weights_on_model_save",),
    "212": ("E misplaced-key optimizer.adam_w_mode",),
}
"""Number -> severity (E or W), code and path of each finding, in the order of the file; notes left out."""

WHY = {
    "unknown-key": "DeepSpeed raises in its pydantic sections and ignores the key elsewhere",
    "misplaced-key": "DeepSpeed ignores it where it stands",
    "removed": "DeepSpeed 0.19 raises when the section is there",
    "type": "DeepSpeed raises, or fails at the first step; in templates a placeholder stands there",
    "batch": "DeepSpeed raises without a batch size",
    "deprecated": "DeepSpeed reads it and asks for the new spelling",
    "no-effect": "DeepSpeed reads it and does nothing with it",
}


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", files() or [None], ids=lambda path: path.name[:3] if path else "none")
def test_verdict(path: Path | None) -> None:
    if path is None:
        pytest.skip(f"{FOLDER} is not there: the public files are not part of the repository")
    number = path.name[:3]
    found = [
        problem
        for problem in examine(path.read_text(), number).problems
        if problem.severity != "note" and problem.code != "not-installed"
    ]
    assert tuple(f"{p.severity[0].upper()} {p.code} {p.path}" for p in found) == VERDICTS.get(number, ())
    assert (number in CLEAN) == (not found)
    assert {p.code for p in found} <= set(WHY)
    assert all(p.line and p.column and p.message for p in found)


def test_all_files_are_judged_fast() -> None:
    if not files():
        pytest.skip(f"{FOLDER} is not there: the public files are not part of the repository")
    assert {path.name[:3] for path in files()} == set(CLEAN) | set(VERDICTS)
    texts = [path.read_text() for path in files()]
    start = time.perf_counter()
    for text in texts:
        examine(text, "x.json")
    assert time.perf_counter() - start < 10
