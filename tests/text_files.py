"""Tokenizers, models and conversations for tests, made without a network."""

import json
import random
import re
from functools import cache

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('who is ' + message['role']) }}{% endif %}"
    "{% if loop.first and tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = re.findall(
    r"\S+", "the a cat dog sees takes gives small large house — naïve façade 東京 😀 ünïcode of with and then"
)


@cache
def _trained():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return found


def tokenizer(folder, *, template=TEMPLATE, end="<|end|>"):
    """A folder with a byte-level BPE of 400 tokens and a chat template."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=_trained(), eos_token=end, pad_token="<|end|>")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def sentence(numbers, longest=20):
    return " ".join(numbers.choices(WORDS, k=numbers.randrange(1, longest)))


def conversations(count, seed=0):
    """Of several turns, some with a system prompt, some with tools, some that end with a question."""
    numbers, found = random.Random(seed), []
    for index in range(count):
        messages = [{"role": "system", "content": sentence(numbers)}] if index % 3 == 0 else []
        for _ in range(numbers.randrange(1, 4)):
            messages += [
                {"role": "user", "content": sentence(numbers)},
                {"role": "assistant", "content": sentence(numbers)},
            ]
        row = {"messages": messages}
        if index % 5 == 0:
            row["tools"] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
            messages += [{"role": "tool", "content": "found"}, {"role": "assistant", "content": "yes"}]
        if index % 7 == 0:
            messages.append({"role": "user", "content": "and?"})
        found.append(row)
    return found


def jsonl(path, rows):
    """Writes one line for each row."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
