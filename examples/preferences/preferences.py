"""Direct preference optimization (Rafailov et al., arXiv 2305.18290) of a model of transformers: a task, and no engine code."""

import json
from pathlib import Path

import torch
import transformers
from torch.nn import functional

import dsframe
from dsframe.data import Pad


def log_probabilities(logits, targets):
    """The log-probability of each answer, ``[answers]``: the sum over its tokens."""
    tokens = functional.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return -tokens.sum(1)


class DirectPreferences(dsframe.Task):
    """Learns to prefer the chosen answer more than the model that the training begins with does."""

    def __init__(self, folder="model", context=64, beta=0.1):
        self.folder, self.context_length, self.beta = folder, context, beta
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def model(self):
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def pretrained(self):
        """For ``dsframe export --to huggingface``: a folder with the same configuration."""
        return {"config": self.model().config.to_json_string(use_diff=False), "tokenizer": None, "tokenizer_sha256": ""}

    def train_data(self):
        return self._rows("train.jsonl")

    def eval_data(self):
        return self._rows("eval.jsonl")

    def _rows(self, name):
        """The pairs of a file, each with what the first model thinks of its answers. Every rank computes it, once."""
        rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").split("\n") if line.strip()]
        reference = self.model().eval()
        with torch.no_grad():
            for first in range(0, len(rows), 16):
                inputs, targets = self._pairs(rows[first : first + 16])
                found = log_probabilities(reference(**inputs).logits, targets).view(-1, 2)
                for row, pair in zip(rows[first : first + 16], found.tolist(), strict=True):
                    row["reference"] = pair
        return rows

    def collate(self, rows):
        inputs, targets = self._pairs(rows)
        reference = torch.tensor([row["reference"] for row in rows])
        return inputs, (targets, reference)

    def _pairs(self, rows):
        """Two sequences for each row: the chosen answer, then the rejected one. Only answers have targets."""
        sequences = [self._sequence(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")]
        batch = Pad(multiple=8)(sequences)
        return batch, batch.pop("labels")

    def _sequence(self, prompt, answer):
        before, after = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        after = [*after, self.tokenizer.eos_token_id]
        tokens, learned = before + after, [-100] * len(before) + after
        end = self.context_length + 1
        return {"input_ids": tokens[:end][:-1], "labels": learned[1:end]}

    def rewards(self, outputs, targets):
        """How much more probable each answer has become, ``[rows, 2]``."""
        tokens, reference = targets
        return self.beta * (log_probabilities(outputs.logits, tokens).view(-1, 2) - reference)

    def loss(self, outputs, targets):
        chosen, rejected = self.rewards(outputs, targets).unbind(1)
        return -functional.logsigmoid(chosen - rejected).mean()

    def metrics(self, outputs, targets):
        chosen, rejected = self.rewards(outputs, targets).unbind(1)
        margin = chosen - rejected
        return {
            "loss": dsframe.Sum(-functional.logsigmoid(margin).sum(), len(margin)),
            "accuracy": dsframe.Sum((margin > 0).sum(), len(margin)),
            "margin": dsframe.Sum(margin.sum(), len(margin)),
        }
