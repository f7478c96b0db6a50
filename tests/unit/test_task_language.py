"""Language modelling: the GPT, the corpora, and their cache."""

import pytest
import torch
from torch import nn

from dsframe.config.schema.settings import LanguageTask as Settings
from dsframe.data import text
from dsframe.errors import DataError, TaskError
from dsframe.model.persistent import aliases
from dsframe.tasks import build
from dsframe.tasks.language import causal, gpt
from dsframe.tasks.layers import assemble


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path / "cache"))


def task(**fields):
    section = {"name": "language", "layers": 2, "heads": 2, "width": 32, "context": 16, "corpus": "synthetic", **fields}
    return build(Settings.model_validate(section), seed=1)


def model(**fields):
    return assemble(gpt(**{"layers": 2, "heads": 2, "width": 32, "context": 16, **fields}), seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_gpt_scores_every_next_byte(tied):
    network = model(tie_embeddings=tied)
    assert network(torch.zeros(3, 16, dtype=torch.int64)).shape == (3, 16, 256)
    assert network(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 256)  # shorter than the context
    names = [name for name, _ in network.named_parameters()]
    assert ("5.weight" in names) == (not tied)
    assert (network[5].weight is network[0].weight) == tied
    assert aliases(network) == ({"5.weight": "0.weight"} if tied else {})


def test_what_is_reported_of_bytes():
    language = task()
    metrics = language.metrics(torch.zeros(2, 16, 256), torch.zeros(2, 16, dtype=torch.int64))
    assert language.units_per_sample == 16
    assert metrics["bits_per_byte"].mean == pytest.approx(8.0), "every byte is as likely"


def test_the_gpt_does_not_look_ahead():
    network = model().eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10], after[0, 10])


@pytest.mark.parametrize(("time", "by_products"), [(1, True), (512, True), (513, False)])
def test_attention_in_bfloat16_is_as_exact_as_torchs_own(time, by_products, monkeypatch):
    """Outcome and gradients beside float64, and beside the errors of torch's kernel."""
    own, generator, calls = nn.functional.scaled_dot_product_attention, torch.Generator().manual_seed(time), []
    packed = torch.randn(2, time, 3, 2, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, time, 2, 8, generator=generator, dtype=torch.float64)

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    def errors(short):
        monkeypatch.setattr("dsframe.tasks.language._SHORT", 512 if short else 0)
        found = []
        for dtype in (torch.float64, torch.bfloat16):
            given = packed.to(dtype, copy=True).requires_grad_()
            outcome = causal(*given.unbind(2))
            (outcome * weights.to(dtype)).sum().backward()
            found.append((outcome.detach().double(), given.grad.double()))
        return [float((a - b).norm() / (a.norm() + 1e-9)) for a, b in zip(*found, strict=True)]

    torchs = errors(short=False)
    calls.clear()
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    ours = errors(short=True)
    assert len(calls) == (1 if by_products else 2), "float64 always goes torch's way"
    assert all(mine < 1.6 * theirs + 1e-3 for mine, theirs in zip(ours, torchs, strict=True)), (ours, torchs)


def test_the_gpt_is_initialised_as_gpt_2():
    network = model(layers=8, width=128)
    block = network[2]
    assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.contract.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert network[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all(not parameter.any() for name, parameter in network.named_parameters() if name.endswith("bias"))


def test_heads_must_divide_the_width():
    with pytest.raises(TaskError, match="width 32 is not a multiple of heads 3"):
        task(heads=3)


def content(source):
    inputs, targets = source.batch(torch.arange(len(source)), 0)
    return bytes([*inputs.flatten().tolist(), int(targets[-1, -1])])


def test_the_last_twentieth_is_held_out(here):
    (here / "book").write_bytes(bytes(range(1, 201)) * 2)
    language = task(corpus="book", context=4)
    assert content(language.eval_data()) == bytes(range(181, 198))
    assert max(content(language.train_data())[-10:]) < 181
    assert len(task(corpus="book", context=4, samples=7).train_data()) == 7


def test_several_files_are_joined_in_the_order_of_their_names(here):
    (here / "deep").mkdir()
    for name, letters in (("b.txt", "bb"), ("deep/c.txt", "ccc"), ("a.txt", "\ufeffa"), ("d.md", "no")):
        (here / name).write_text(letters)
    pattern = "**/*.txt"
    assert bytes(text.read_corpus(pattern).tolist()) == b"abbccc"
    (here / "[a].txt").write_text("of this name")
    assert bytes(text.read_corpus("[a].txt").tolist()) == b"of this name"


def test_the_synthetic_corpus_is_fixed():
    tokens = text.synthetic(1 << 20).tolist()
    assert len(tokens) == 1 << 20
    assert tokens == text.synthetic(1 << 20).tolist()
    assert set(tokens) == {32, *range(97, 123)}


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "short").write_text("x" * 100)
    with pytest.raises(DataError, match=r"the text has \d+ bytes, too few for one window of 16"):
        task(corpus=str(tmp_path / "short")).train_data()
