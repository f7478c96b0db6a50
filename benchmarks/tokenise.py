"""Ranks that start on a corpus of JSON lines: time to tokenise it once, memory of each rank, and time of the second start.

    python -m benchmarks.tokenise [--megabytes 20 200] [--ranks 4] [--packing documents] [--json FILE]

Started by torchrun without an engine: each rank calls what a training calls before its first step (``Task.prepare`` by one of them,
then the data), and reads 50 batches. Memory is the highest anonymous memory (RssAnon of /proc/self/status, looked at every 10 ms)
above that before the data: pages of the memory-mapped files are not in it, the system takes them back when it needs them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from dsframe.cluster import world as worlds

CONTEXT, BATCHES, BATCH = 512, 50, 8


def corpus(path, megabytes):
    """Documents of 1 to 40 lines of the Python standard library."""
    from dsframe.data.text import read_corpus

    lines = bytes(read_corpus("stdlib").numpy()).decode(errors="replace").splitlines()
    numbers, size = random.Random(0), 0
    with path.open("w", encoding="utf-8") as out:
        while size < megabytes << 20:
            first = numbers.randrange(len(lines))
            text = "\n".join(lines[first : first + numbers.randrange(1, 41)])
            if text.strip():
                size += out.write(json.dumps({"text": text}) + "\n")


def tokenizer(folder, text):
    """A byte-level BPE of 8,000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    with text.open(encoding="utf-8") as file:
        found.train_from_iterator((json.loads(line)["text"] for line, _ in zip(file, range(5000))), trainer)  # noqa: B905
    PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>").save_pretrained(folder)


def task(folder, packing):
    """The task of ``corpus.jsonl`` and the tokenizer in ``folder``."""
    from dsframe.config.schema.settings import CausalLanguageModelTask
    from dsframe.tasks import build

    data = {"train": str(folder / "corpus.jsonl"), "packing": packing}
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    section = {"name": "causal-language-model", "model": llama, "context": CONTEXT, "tokenizer": str(folder / "words")}
    section |= {"data": data, "data_dir": str(folder / "cache")}
    return build(CausalLanguageModelTask.model_validate(section), seed=1)


def anonymous():
    """Bytes of this process's memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def rank(folder, packing):
    """One rank: prints a line of JSON."""
    from dsframe.data import Loader
    from dsframe.tasks import preparation

    world, found = worlds.here(), task(folder, packing)
    highest = before = anonymous()
    over = threading.Event()

    def look():
        nonlocal highest
        while not over.wait(0.01):
            highest = max(highest, anonymous())

    threading.Thread(target=look, daemon=True).start()
    began = time.perf_counter()
    said = []
    preparation.prepare(found, world, said.append)
    source = found.train_data()
    ready = time.perf_counter() - began
    loader = Loader(source, seed=1, micro_batch_size=BATCH, rank=world.rank, ranks=world.size)
    for _ in loader.stream(0, BATCHES):
        pass
    over.set()
    line = {"rank": world.rank, "seconds": ready, "mib": (highest - before) / 2**20, "base_mib": before / 2**20}
    (folder / f"rank{world.rank}.json").write_text(json.dumps({**line, "said": said}))


def start(folder, ranks, packing):
    """One start of all ranks."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*words, "-m", "benchmarks.tokenise", "--rank", str(folder), "--packing", packing]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in range(ranks)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--packing", default="documents", choices=("concatenate", "rows", "documents"))
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.packing)
        return
    results = []
    print("      MB  start   seconds  MiB above base, by rank")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(prefix="dsframe-tokenise-") as name:
            folder = Path(name)
            corpus(folder / "corpus.jsonl", megabytes)
            tokenizer(folder / "words", folder / "corpus.jsonl")
            time.sleep(2.5)  # a file that has changed just now is read again at each start
            for which in ("first", "second"):
                found = start(folder, options.ranks, options.packing)
                results.append({"megabytes": megabytes, "start": which, "ranks": found})
                slowest = max(one["seconds"] for one in found)
                memory = " ".join(f"{one['mib']:7.1f}" for one in found)
                print(f"{megabytes:8} {which:>6} {slowest:9.2f}  {memory}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
