"""The longest context that trains under a fixed limit of memory, without and with what dsframe has against it.

    python -m benchmarks.longest_context [--limit MIB] [--ranks 1,2,4] [--json FILE]

Each rank may have so much private memory (RLIMIT_DATA) above what it has once torch, transformers and DeepSpeed are loaded; a step
that needs more fails, as on a GPU. A Llama of 2 blocks, one sequence in a step, AdamW, ZeRO-1, fp32, two steps. ``before`` is data
parallelism alone, ``after`` adds recomputed blocks, and on several ranks sequence parallelism. Contexts are
doubled until one fails, and then tried in between down to a quarter.
"""

import argparse
import importlib
import json
import resource
import sys
import tempfile
from pathlib import Path

from benchmarks import processes
from dsframe.cluster import world as worlds
from dsframe.config import load
from dsframe.run import execute

MIB = 1 << 20
OUT_OF_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory", "ENOMEM")
SECONDS = 560
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1 << 20,
    "vocab_size": 8192,
}
AFTER = {"activation_checkpointing": True}


def document(context, shared, model, run_dir):
    """The file of a run in which ``shared`` ranks share each sequence."""
    task = {"name": "causal-language-model", "model": MODEL, "context": context, "corpus": "synthetic", "samples": 8}
    settings = {"engine": "deepspeed", "steps": 2, "threads_per_rank": 1, "eval_samples": 1, "run_dir": run_dir}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 4_000_000, "allgather_bucket_size": 4_000_000},
        **({"sequence_parallel_size": shared} if shared > 1 else {}),
        "dsframe": {**settings, "task": task, "model": model, "checkpoints": {"at_end": False}},
    }


def rank(path, limit):
    """One rank: trains the file within ``limit`` MiB; 0: none."""
    for module in ("deepspeed", "transformers.models.llama.modeling_llama", "dsframe.engines.deepspeed.engine"):
        importlib.import_module(module)
    if limit:
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        most = int(held.split()[1]) * 1024 + limit * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    execute(load(path), world=worlds.here(), quiet=True)
    return 0


def train(context, ranks, shared, model, limit=0):
    """The run's summary; None where it took too much memory."""
    with tempfile.TemporaryDirectory(prefix="dsframe-context-") as folder:
        file, run_dir = Path(folder, "file.json"), Path(folder, "run")
        file.write_text(json.dumps(document(context, shared, model, str(run_dir))))
        own = ["-m", "benchmarks.longest_context", "--rank", str(file), "--limit", str(limit)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *own]
        command = [sys.executable, *own] if ranks == 1 else command
        done = processes.run(command, timeout=SECONDS)
        if done.returncode == 0:
            return json.loads((run_dir / "summary.json").read_text())
        if any(text in done.stdout + done.stderr for text in OUT_OF_MEMORY):
            return None
        raise SystemExit(
            f"context {context} on {ranks} ranks failed otherwise:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def longest(ranks, shared, model, limit, context):
    """In tokens; steps of a quarter of the last power of two that fits. ``context``: the first that is tried."""
    while not train(context, ranks, shared, model, limit):
        context //= 2
    while train(2 * context, ranks, shared, model, limit):
        context *= 2
        print(f"  {ranks} ranks, {shared} share: {context} fits", file=sys.stderr, flush=True)
    for step in (context // 2, context // 4):
        if train(context + step, ranks, shared, model, limit):
            context += step
            print(f"  {ranks} ranks, {shared} share: {context} fits", file=sys.stderr, flush=True)
    return context


def contexts(limit, ranks):
    """Prints the table of the longest contexts."""
    print(f"{'ranks':>6}{'before':>10}{'after':>10}{'ratio':>8}  tokens, {limit} MiB a rank")
    rows = []
    for size in ranks:
        before, after = longest(size, 1, {}, limit, 1024), longest(size, size, AFTER, limit, 4096 * size)
        rows.append({"ranks": size, "before": before, "after": after})
        print(f"{size:6}{before:10,}{after:10,}{after / before:8.1f}", flush=True)
    return rows


def main():
    """Prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.longest_context", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--limit", type=int, default=512, metavar="MIB", help="of a rank, above what it has at first")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options.rank, options.limit)
    processes.heed_sigterm()
    ranks = [int(number) for number in options.ranks.split(",")]
    rows = contexts(options.limit, ranks)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
