"""Which models of transformers may have slices of sequences, and what each rank computes of their attention."""

import pytest
import torch

from dsframe.errors import TaskError
from dsframe.tasks import _transformers, shared_sequences
from dsframe.tasks.huggingface import small
from tests.text_files import LLAMA

if _transformers.importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


def config(kind, **more):
    known = _transformers.transformers().AutoConfig.for_model(kind)
    settings = {name: value for name, value in {**LLAMA, **more}.items() if hasattr(known, name)}
    return _transformers.configure("AutoModelForCausalLM", {**settings, "model_type": kind}, {"vocab_size": 64})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 5}),
        ("mixtral", {}),
        ("gpt2", {}),
    ],
)
def test_models_whose_attention_can_be_shared(kind, more):
    """With numbers: the small model's outputs are those of its own attention, and nothing else looks at other positions."""
    before = torch.get_rng_state()
    shared_sequences.refuse_unshareable(small(config(kind, **more)), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gemma2", "this model's attention uses softcap"),
        ("bloom", "its attention does not go through transformers' interface"),
        ("mamba", "its attention does not go through transformers' interface"),
    ],
)
def test_models_that_are_refused(kind, message):
    more = {"head_dim": 8} if kind == "gemma2" else {}
    with pytest.raises(TaskError, match=f'not possible with model_type "{kind}": .*{message}'):
        shared_sequences.refuse_unshareable(small(config(kind, **more)), 2)


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(TaskError, match="num_attention_heads 4 is not divisible by sequence_parallel_size 3"):
        shared_sequences.refuse_unshareable(small(config("llama")), 3)


def test_a_model_that_looks_elsewhere_is_refused(monkeypatch):
    """As a convolution along time would."""
    module = _transformers.importlib.import_module("transformers.models.llama.modeling_llama")
    plain = module.LlamaMLP.forward
    monkeypatch.setattr(module.LlamaMLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(TaskError, match="its positions look at each other outside of attention"):
        shared_sequences.refuse_unshareable(small(config("llama")), 2)
    monkeypatch.setattr(shared_sequences, "_causal_attention", lambda parts, *_: parts[2])
    with pytest.raises(TaskError, match="its attention is another one"):
        shared_sequences.refuse_unshareable(small(config("llama")), 2)


@pytest.mark.parametrize("more", [{"attention_mask": torch.ones(1)}, {"is_causal": False}])
def test_attention_that_is_not_causal_is_refused(more):
    with pytest.raises(TaskError, match="a mask of its own"):
        shared_sequences._attention(None, None, None, None, **more)


def test_attention_drops_out():
    assert not shared_sequences._causal_attention([torch.ones(1, 1, 2, 2)] * 3, None, 1.0, None).any()


@pytest.mark.parametrize(
    ("heads", "groups", "parts", "copies"), [(4, 2, 2, 1), (4, 1, 2, 2), (8, 2, 4, 2), (4, 2, 4, 2), (6, 2, 3, 3)]
)
def test_each_rank_has_whole_key_heads(heads, groups, parts, copies):
    found = shared_sequences._copies(heads, groups, parts)
    assert found == copies
    assert groups * found % parts == 0
    assert heads % (groups * found) == 0


class Ranks:
    """All ranks in one process: the exchange cuts what it gets into heads, and joins the results."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, attention):
        def exchanged(*tensors):
            cut = zip(*(tensor.chunk(self.parts, dim=2) for tensor in tensors), strict=True)
            return torch.cat([attention(*one) for one in cut], dim=2)

        return exchanged


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_by_themselves_are_the_model(kind, groups, packed):
    """Windows, grouped heads, and documents of several lengths in a row."""
    torch.manual_seed(0)
    made = config(kind, num_key_value_heads=groups, sliding_window=4)
    model = _transformers.build("AutoModelForCausalLM", made, None).eval()
    inputs = {"input_ids": torch.randint(1, 60, (2, 12))}
    if packed:
        places = [[*range(7), *range(5)], [*range(2), *range(9), 0]]
        inputs["position_ids"] = torch.tensor(places)
    before = model(**inputs).logits
    shared = shared_sequences.Sequences(model, 4, Ranks(4))
    torch.testing.assert_close(model(**shared.see(dict(inputs))).logits, before, atol=1e-5, rtol=1e-5)
    assert shared.calls == 2
    shared.see(inputs["input_ids"])
    assert shared._documents is None
