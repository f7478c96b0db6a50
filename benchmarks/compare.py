"""dsframe beside hand-written loops and other frameworks: speed, memory and losses, measured in turns in one run.

    python -m benchmarks.compare                              # everything (make bench)
    python -m benchmarks.compare --quick --models cnn --only zero1
    python -m benchmarks.compare --models gpt --only ddp,horovod --rounds 15

A match starts all its contestants as real jobs of two processes under their own launchers, the same threads a rank, the same model,
weights, samples and global batch, and lets them run in turns, a block of steps each (``benchmarks.match``). What is printed: the
median rate of each, how many times that dsframe's is in the same round (median, lowest, highest), the same by the processor
time that all ranks took (which a neighbour on the machine changes less; sleeping costs nothing there, spinning does), the peak
resident set of each rank, and how far the first ten losses are from dsframe's at most. Exits with 1 where losses differ.
``benchmarks/by_hand.py``, ``peers.py`` and ``workloads.py`` say what exactly runs, and why it is fair. Two matches need a word
more. "fast" is dsframe with its switches for speed (bf16 autocast; for images also compiled and channels last) beside each peer
twice: as it is by default, in fp32, and with its own switch for bf16. Where the processor only emulates bf16 all of it is without,
and dsframe is not compiled either: compiling made the CNN slower in fp32. ("horovod-fast" has the same switches.) And ZeRO-3 by
hand runs twice where dsframe keeps a small model whole: with DeepSpeed's defaults, which shard the larger parameters, and with the
two persistence thresholds set so that all are kept.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.match import Contestant, play
from benchmarks.processes import heed_sigterm

CHECKED_STEPS = 10  # as in benchmarks.gate, which imports torch
BATCH = {"cnn": 128, "resnet18": 128, "gpt": 16}
UNITS = {"cnn": 128, "resnet18": 128, "gpt": 16 * 128}
UNIT = {"cnn": "samples/s", "resnet18": "samples/s", "gpt": "tokens/s"}
MICRO = 4
TOLERANCE = 1e-4
"""Of a loss, in fp32: what the order of summation makes of it in ten steps stays far below."""
TOLERANCE_KERNELS = 1e-3
"""Channels last: other convolutions, and Adam, which makes a gradient of rounding errors as large as any (measured: 4e-4)."""
TOLERANCE_BF16 = 5e-2
SHORT = bool({"avx512_bf16", "amx_bf16", "bf16"} & {*Path("/proc/cpuinfo").read_text(encoding="utf-8").split()})
"""Whether this processor has instructions for bf16; without them it is slower than fp32, and no switch for speed."""
KEPT = ("cnn", "gpt")
"""Small enough for dsframe's ZeRO-3 to keep them whole (``Zero.keeps_whole``)."""


def ours(kind, workload, *, fast=False):
    """dsframe with the strategy ``kind``, everything else as it is by default. ``fast``: with the switches for speed."""
    micro = MICRO if kind == "pipeline" else 1
    section = {
        "steps": 1_000_000,
        "log_every_steps": 100,
        "engine": {"ddp": "ddp", "fsdp": "fsdp", "horovod": "horovod"}.get(kind, "deepspeed"),
    }
    config = {
        "train_batch_size": BATCH[workload],
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "dsframe": section,
    }
    if kind.startswith("zero"):
        config["zero_optimization"] = {"stage": int(kind[-1])}
    if kind == "pipeline":
        config["pipeline"] = {"stages": 2}
    if fast:
        if SHORT:
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        section["model"] = {"channels_last": True, "compile": SHORT} if workload != "gpt" else {}
    launcher = {"ddp": "torchrun", "fsdp": "torchrun", "horovod": "horovodrun"}.get(kind, "deepspeed")
    name = f"dsframe {kind}{' fast' if fast else ''}"
    return Contestant(name, launcher, "ours.py", (name.replace(" ", "-"),), config, micro=micro)


def by_hand(kind):
    launcher = {"ddp": "torchrun", "fsdp": "torchrun", "horovod": "horovodrun"}.get(kind, "deepspeed")
    return Contestant(f"{kind} by hand", launcher, "by_hand.py", (kind,), micro=MICRO if kind == "pipeline" else 1)


def peer(kind, name=""):
    return Contestant(name or kind, "torchrun", "peers.py", (kind,))


PEERS = ("accelerate", "lightning", "transformers")
MATCHES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "pipeline", "horovod", "fast", "horovod-fast")
UNTESTED = {
    ("resnet18", "pipeline"), ("resnet18", "fsdp"), ("resnet18", "zero2"), ("resnet18", "fast"), ("resnet18", "horovod-fast"),
}  # fmt: skip
"""Left out of the whole table to keep it short; the CNN and the GPT have them."""


def contestants(match, workload):
    """dsframe first."""
    if match == "ddp":
        return [ours("ddp", workload), by_hand("ddp"), *map(peer, PEERS)]
    if match == "fast":
        defaults = [peer(kind, f"{kind} (its default, fp32)") for kind in PEERS]
        short = [peer(f"{kind}-bf16", f"{kind} (bf16, not compiled)") for kind in PEERS if SHORT]
        return [ours("ddp", workload, fast=True), *defaults, *short]
    if match.startswith("horovod"):
        unset = Contestant("horovod by hand, threads not set", "horovodrun", "by_hand.py", ("horovod",), threads=None)
        return [ours("horovod", workload, fast=match == "horovod-fast"), by_hand("horovod"), unset]
    if match == "zero3" and workload in KEPT:
        plain = replace(by_hand(match), name="zero3 by hand, its default shards")
        kept = Contestant("zero3 by hand, all kept whole", "deepspeed", "by_hand.py", ("zero3-kept",))
        return [ours(match, workload), plain, kept]
    return [ours(match, workload), by_hand(match)]


def rows(match, workload, results):
    """The table's lines of one match."""
    first = next(iter(results))
    tolerance = (TOLERANCE_BF16 if SHORT else TOLERANCE_KERNELS) if "fast" in match else TOLERANCE
    found = []
    for name, result in results.items():
        ratios = [mine / theirs for mine, theirs in zip(results[first].rates, result.rates, strict=True)]
        cpu_ratios = [mine / theirs for mine, theirs in zip(results[first].cpu_rates, result.cpu_rates, strict=True)]
        differences = [abs(a - b) for a, b in zip(results[first].losses, result.losses, strict=True)]
        found.append(
            {
                "model": workload,
                "match": match,
                "name": name,
                "unit": UNIT[workload],
                "rate": statistics.median(result.rates),
                "ratio": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "cpu_ratio": statistics.median(cpu_ratios),
                "cpu_ratio_low": min(cpu_ratios),
                "cpu_ratio_high": max(cpu_ratios),
                "loss_difference": max(differences, key=lambda one: (math.isnan(one), one)),
                "same_losses": all(
                    one <= tolerance for one in differences
                ),  # nothing is below NaN, and NaN below nothing
                **asdict(result),
            }
        )
    return found


def line(row):
    peak = "  ".join(f"{value / 2**20:,.0f}" for value in row["peak_bytes"])
    verdict = f"{row['loss_difference']:8.1e}{'' if row['same_losses'] else '  LOSSES DIFFER'}"
    own = row["name"].startswith("dsframe")
    ratios = "".join(
        ("" if own else f"{row[key]:6.2f} ({row[f'{key}_low']:.2f}-{row[f'{key}_high']:.2f})").ljust(21)
        for key in ("ratio", "cpu_ratio")
    )
    return f"{row['model']:9} {row['name']:34} {row['rate']:9,.0f} {ratios} {peak:>14} {verdict}  {row['threads']}"


HEADER = (
    f"{'model':9} {'who':34} {'a second':>9} {'dsframe is ... times':21}{'by CPU time':21}"
    f" {'peak MiB':>14} {'loss diff.':>8}  threads"
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="cnn,gpt,resnet18", help="some of them (default: %(default)s)")
    parser.add_argument("--only", default=",".join(MATCHES), help="matches (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each contestant runs (default: %(default)s)")
    parser.add_argument("--block", type=float, default=1.2, help="seconds of a block (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="three rounds of half a second")
    parser.add_argument("--no-peers", action="store_true", help="without Accelerate, Lightning and the HF Trainer")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/compare.json"), help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    heed_sigterm()
    if options.quick:
        options.rounds, options.block = 3, 0.5
    models, only = options.models.split(","), options.only.split(",")
    if wrong := [*({*models} - {*UNIT}), *({*only} - {*MATCHES})]:
        parser.error(f"unknown: {', '.join(wrong)}")
    table = []
    failed = []
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; 2 processes; {options.rounds} rounds of {options.block} s\n{HEADER}"
    )
    for workload in models:
        for match in only:
            if (workload, match) in UNTESTED and options.only == parser.get_default("only"):
                continue
            players = contestants(match, workload)
            if options.no_peers:
                players = [player for player in players if player.program != "peers.py"]
            try:
                results = play(
                    players,
                    workload,
                    units=UNITS[workload],
                    rounds=options.rounds,
                    block_seconds=options.block,
                    checked=CHECKED_STEPS,
                    failed=failed.append,
                )
            except RuntimeError as error:
                failed.append(str(error))
                continue
            found = rows(match, workload, results)
            table += found
            print("\n".join(map(line, found)), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"rounds": options.rounds, "rows": table}, indent=1) + "\n")
    drawn = plot(table, options.json.with_suffix(".svg"))
    print("\n".join(failed), file=sys.stderr)
    print(f"{options.json}, {options.json.with_suffix('.svg')}" if drawn else options.json)
    return 1 if failed or not all(row["same_losses"] for row in table) else 0


def plot(table, path):
    """Ratios as horizontal bars, with what the rounds spread over as a line. Returns False where there are none to draw."""
    shown = [row for row in table if not row["name"].startswith("dsframe")]
    if not shown:
        return False
    scale = 420 / max(1.5, *(min(row["ratio_high"], 5.0) for row in shown))
    parts = []
    for number, row in enumerate(shown):
        y = 30 + 20 * number
        low, middle, high = (330 + scale * min(row[key], 5.0) for key in ("ratio_low", "ratio", "ratio_high"))
        parts.append(
            f'<text x="320" y="{y + 11}" text-anchor="end">{row["model"]}: {row["match"]} / {row["name"]}</text>'
            f'<rect x="330" y="{y}" width="{middle - 330:.1f}" height="14" fill="#4878a8"/>'
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7}" y2="{y + 7}" stroke="#222"/>'
            f'<text x="{high + 6:.1f}" y="{y + 11}">{row["ratio"]:.2f}</text>'
        )
    height = 50 + 20 * len(shown)
    one = 330 + scale
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="820" height="{height}" fill="#fff"/><text x="{one}" y="18" text-anchor="middle">1.0</text>'
        f'<line x1="{one}" x2="{one}" y1="22" y2="{height - 10}" stroke="#b33"/>{"".join(parts)}</svg>\n'
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
