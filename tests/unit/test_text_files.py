"""Language models on documents and conversations from files: what is read, how rows are made, what is learned, what is refused."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dsframe.config.schema.settings import CausalLanguageModelTask as Settings
from dsframe.data import Loader, documents, tokenised
from dsframe.data.encoders import TextEncoder
from dsframe.data.fingerprint import assert_same_samples
from dsframe.data.packed import IGNORED
from dsframe.errors import DataError, TaskError
from dsframe.tasks import build
from tests.files import write_json
from tests.text_files import LLAMA, TEMPLATE, conversations, jsonl, sentence, tokenizer
from tests.threads import Room


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def task(train, *, context=32, model=LLAMA, words=None, **data):
    section = {"name": "causal-language-model", "model": model, "context": context}
    if words is not None:
        section["tokenizer"] = str(words)
    return build(Settings.model_validate({**section, "data": {"train": train, **data}}), seed=1)


def texts(count=40):
    numbers = random.Random(0)
    return [sentence(numbers) for _ in range(count)]


def tokens(found):
    opened = tokenised.find_tokens(found._recipes["train"])
    return [int(token) for token in opened.tokens]


def prepared(*arguments, **more):
    found = task(*arguments, **more)
    found.prepare(lambda line: None)
    return found


def test_every_kind_of_file_gives_the_same_tokens(tmp_path):
    import datasets
    import pyarrow as arrow
    from pyarrow import parquet

    rows = texts()
    jsonl(tmp_path / "a.jsonl", [{"id": 1, "text": row} for row in rows])
    parquet.write_table(arrow.table({"id": [1] * len(rows), "text": rows}), tmp_path / "b.parquet")
    datasets.Dataset.from_dict({"text": rows}).save_to_disk("saved")
    for number, row in enumerate(rows):
        (tmp_path / f"{number:03}.txt").write_text(row)
    expected = [byte for row in rows for byte in (*row.encode(), 256)]
    for pattern in ("a.jsonl", "b.parquet", "saved", "*.txt"):
        assert tokens(prepared(pattern)) == expected, pattern
    words = tokenizer(tmp_path / "words")
    again = tokens(prepared(["a.jsonl", "b.parquet"], words=words))
    assert again[: len(again) // 2] == again[len(again) // 2 :]
    assert tokens(prepared("saved", words=words)) == tokens(prepared("*.txt", words=words)) == again[: len(again) // 2]


def test_a_text_file_larger_than_a_piece_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("dsframe.data.documents.PIECE", 7)
    text = "東京 is\n\nlarge é\nand naïve without an end 😀😀😀"
    (tmp_path / "a.txt").write_text(text)
    assert tokens(prepared("a.txt", context=4)) == [*text.encode(), 256]
    found = prepared("a.txt", context=4, packing="rows").train_data().batch(torch.arange(2), 0)
    assert found[0]["input_ids"].tolist()[1][:4] == [*text.encode()][4:8]
    assert found[1].tolist()[0][:4] == [*text.encode()][1:5]


ATTENTION = ("sdpa", "eager")


@pytest.mark.parametrize("attention", ATTENTION)
def test_packed_documents_have_the_losses_of_single_ones(attention, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(60)])
    alone, packed = (prepared("a.jsonl", context=96, packing=how) for how in ("rows", "documents"))
    alone.pretrained_config._attn_implementation = attention
    torch.manual_seed(0)
    network = alone.model().eval()
    assert network.config._attn_implementation == attention

    def loss(one):
        source, total, count = one.train_data(), torch.zeros(()), 0
        for index in range(0, len(source), 4):
            inputs, targets = source.batch(torch.arange(index, min(index + 4, len(source))), 0)
            items = int(one.loss_weight(targets))
            total, count = total + one.loss(network(**inputs), targets) * items, count + items
        gradients = torch.autograd.grad(total / count, network.parameters())
        return float((total / count).detach()), count, gradients

    (first, items, slopes), (second, others, others_slopes) = loss(alone), loss(packed)
    assert len(packed.train_data()) < len(alone.train_data()) * 0.7
    assert items == others
    assert first == pytest.approx(second, abs=1e-5)
    for mine, theirs in zip(slopes, others_slopes, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_padding_behind_packed_documents_is_no_experts_load(tmp_path):
    """The balance of experts is that of the documents one a row, which have a mask; the first has one position only."""
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ["a", *texts(3)]])
    mixture = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 50.0}
    losses, pads = [], []
    for how in ("rows", "documents"):
        found = prepared("a.jsonl", context=96, packing=how, model={**LLAMA, "model_type": "mixtral", **mixture})
        torch.manual_seed(0)
        network, source = found.model().eval(), found.train_data()
        inputs, targets = source.batch(torch.arange(len(source)), 0)
        losses.append(found.loss(network(**inputs), targets)[0].item())
        pads.append(int((inputs["input_ids"] == 0).sum()))
    assert min(pads) > 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_model_whose_packed_documents_see_each_other_is_refused(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts()])
    with pytest.raises(TaskError, match=r"see each other|cannot take"):
        task(
            "a.jsonl", packing="documents", model={"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 1}
        )
    from dsframe.tasks import _transformers

    class Leaks(nn.Module):
        def forward(self, input_ids, position_ids=None):
            return type("Outputs", (), {"logits": input_ids.cumsum(-1)[..., None].float()})

    monkeypatch.setattr(_transformers, "build", lambda *_: Leaks())
    with pytest.raises(TaskError, match="packed documents see each other"):
        task("a.jsonl", packing="documents")


def answers(batch):
    """Of each row the tokens, and those that are learned."""
    inputs, targets = batch
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [
        (ids[:length], [token for token in learned if token != IGNORED])
        for ids, learned, length in zip(inputs["input_ids"].tolist(), targets.tolist(), lengths, strict=True)
    ]


def test_the_masks_of_fifty_conversations_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    words, rows = tokenizer(tmp_path / "words"), conversations(50)
    jsonl(tmp_path / "a.jsonl", rows)
    found = prepared("a.jsonl", context=96, words=words, format="conversations")
    theirs = AutoTokenizer.from_pretrained(words)
    expected, cut = [], 0
    for row in rows:
        one = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = one["input_ids"][:97], one["assistant_masks"][:97]
        cut += len(one["input_ids"]) > 97
        learned = [token for token, counts in zip(ids[1:], mask[1:], strict=True) if counts]
        if learned:
            expected.append((ids[:-1], learned))
    source = found.train_data()
    assert answers(source.batch(torch.arange(len(source)), 0)) == expected
    opened = tokenised.find_tokens(found._recipes["train"])
    assert opened.counts.long == cut > 3
    assert opened.counts.dropped == 50 - len(expected)
    packed = prepared("a.jsonl", context=96, words=words, format="conversations", packing="documents").train_data()
    learned = (packed.batch(torch.arange(len(packed)), 0)[1] != IGNORED).sum()
    assert int(learned) == sum(len(one) for _, one in expected)


def test_completions_are_learned_and_rows_without_an_answer_are_left_out(tmp_path):
    words = tokenizer(
        tmp_path / "words", template=TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    ask, say = [{"role": "user", "content": "the cat"}], [{"role": "assistant", "content": "sees"}]
    rows = [
        {"prompt": "the cat ", "completion": "sees a dog"},
        {"prompt": ask, "completion": say},
        {"prompt": "a house", "completion": ""},
        {"prompt": " ".join(["naïve"] * 120), "completion": "too late"},
    ]
    jsonl(tmp_path / "a.jsonl", rows)
    found, said = task("a.jsonl", context=64, words=words, format="conversations"), []
    found.prepare(said.append)
    source = found.train_data()
    learned = [found.tokenizer.decode(one) for _, one in answers(source.batch(torch.arange(len(source)), 0))]
    assert learned == [" sees a dog<|end|>", "sees<|im_end|>"]  # one token: the text is that of prompt and completion
    assert said[0].startswith("task.data.train: 2 documents, ")
    assert "1 documents are longer than context 64: " in said[1]
    assert said[2] == "task.data.train: 2 documents have no target within context 64 and were left out"


@pytest.mark.parametrize(
    ("kind", "place"), [("jsonl", "a.jsonl:1"), ("parquet", "a.parquet, row 0"), ("saved", "a.saved, row 0")]
)
def test_what_is_not_read_is_said_at_every_start(kind, place, tmp_path):
    """The second one reads no rows: it takes the tokens of the first. Names and places of rows are read by nobody."""
    rows = [{"id": 1, "source": "web", "doc_id": 2, "images": ["a"], **row} for row in conversations(9)]
    for row in rows:
        row.pop("tools", None)
    written(tmp_path / f"a.{kind}", rows)
    words = tokenizer(tmp_path / "words")
    for _ in range(2):
        said = []
        task(f"a.{kind}", words=words, format="conversations").prepare(said.append)
        assert [line for line in said if "not read" in line] == [f"warning: {place}: columns that are not read: images"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_columns_of_other_formats_are_named_beside_a_text(kind, tmp_path):
    rows = [{"text": "a b", "id": 3, "title": "t", "prompt": "a", "label": 0, "rejected": None} for _ in range(3)]
    written(tmp_path / f"a.{kind}", rows[:2])
    found, said = task(f"a.{kind}", context=2), []
    found.prepare(said.append)
    (line,) = (line for line in said if "not read" in line)
    assert line.endswith("columns that are not read: label, prompt" + ", rejected" * (kind != "jsonl"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("conversation", [True, False])
def test_a_file_without_the_columns_is_told_what_it_has(kind, conversation, tmp_path):
    written(tmp_path / f"a.{kind}", [{"chosen": "a", "rejected": "b"}])
    given = {"words": tokenizer(tmp_path / "words"), "format": "conversations"} if conversation else {}
    with pytest.raises(DataError) as refused:
        task(f"a.{kind}", **given).prepare(lambda line: None)
    wanted = '"messages" or "prompt and completion"' if conversation else '"text"'
    remedy = "preference pairs are a task of your own" if conversation else 'name the column of the text in "field"'
    assert f"no column {wanted}, or it is null; it has 'chosen', 'rejected'; {remedy}" in str(refused.value)


def written(path, rows):
    """Writes rows in the form that the suffix names."""
    if path.suffix == ".jsonl":
        jsonl(path, rows)
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    else:
        pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_list(rows).save_to_disk(path)


def test_a_template_that_writes_the_date_is_said_and_has_tokens_of_its_own(tmp_path):
    jsonl(tmp_path / "a.jsonl", conversations(9))
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}" + TEMPLATE
    words, digests = tokenizer(tmp_path / "words"), set()
    for template in (TEMPLATE, dated):
        (tmp_path / "t.jinja").write_text(template)
        found, said = task("a.jsonl", words=words, format="conversations", chat_template="t.jinja"), []
        found.prepare(said.append)
        digests.add(found._recipes["train"].digest)
        assert ("day's date" in said[0]) == (template is dated)
    assert len(digests) == 2


def test_padded_rows_are_no_longer_than_the_context(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "x" * length} for length in (3, 70, 20)])
    found = task("a.jsonl", context=60, packing="rows")
    found.prepare(lambda line: None)
    assert [found.train_data().batch(torch.tensor(rows), 0)[0]["input_ids"].shape[1] for rows in ([0], [0, 1])] == [
        8,
        60,
    ]


def test_of_two_rows_the_third_is_the_first(tmp_path):
    """An order of the task's may ask for a row again."""
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("abc", "def", "ghi")])
    found = prepared("a.jsonl", packing="rows")
    found.settings = found.settings.model_copy(update={"samples": 2})
    source = found.train_data()
    assert len(source) == 2
    assert source.batch(torch.tensor([2]), 0)[1].equal(source.batch(torch.tensor([0]), 0)[1])


def test_the_second_start_reads_what_the_first_has_made(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_RECENT_NANOSECONDS", -(10**18))  # each digest is kept, however new the file is
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(5000)])
    os.utime(path, (time.time() - 100,) * 2)
    first = prepared("a.jsonl", packing="documents")
    folder = first._recipes["train"].folder()
    inode = (folder / "tokens").stat().st_ino
    assert len(prepared("a.jsonl", packing="documents").train_data()) == len(first.train_data())
    assert (folder / "tokens").stat().st_ino == inode
    before = path.stat()
    content = path.read_text()
    path.write_text(content[:-4] + ("z" if content[-4] != "z" else "y") + content[-3:])  # the same size ...
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # ... and time
    assert first._recipes["train"].folder() != folder
    (folder / "tokens").write_bytes(b"1234")
    path.write_text(content)
    assert tokenised.find_tokens(first._recipes["train"]) is None  # damaged


def test_the_digest_of_files_is_of_each_and_kept_where_they_are_not_new(tmp_path):
    """Their modification time may be one that a program has set."""
    paths, digests = [tmp_path / "a.txt", tmp_path / "b.txt"], set()
    for contents in (("ab", "c"), ("a", "bc")):
        for path, content in zip(paths, contents, strict=True):
            path.write_text(content)
            os.utime(path, (1, 1))
        digests.add(documents.digest(paths, None))
    assert len(digests) == 2
    assert not list(tmp_path.rglob("sources/*"))


@pytest.mark.parametrize("packing", ["rows", "concatenate"])
def test_a_line_that_was_edited_is_seen_wherever_it_is(packing, tmp_path):
    """Not only where one of the five samples differs that are compared in any case."""

    def told(word):
        lines = ["a cat sees a dog"] * 60
        lines[7] = f"a {word} sees a dog"
        jsonl(tmp_path / "a.jsonl", [{"text": line} for line in lines])
        source = prepared("a.jsonl", packing=packing, context=8).train_data()
        return Room(1).run(lambda ranks: assert_same_samples(ranks, Loader(source, seed=0, micro_batch_size=2)))[0]

    before, after = told("cat"), told("cow")
    assert [name for name in before if before[name] != after[name]] == ["(which one is unknown)"]
    assert told("cat") == before


def test_what_a_killed_process_left_is_neither_read_nor_kept(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts()])
    found = task("a.jsonl")
    child = os.fork()
    if child == 0:
        tokenised._sync = lambda folder: os._exit(0)  # everything is written but the name
        found.prepare(lambda line: None)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    cache = tmp_path / "cache" / "tokens"
    assert [path.name.endswith(f".{child}.partial") for path in cache.iterdir() if path.name != "sources"] == [True]
    assert tokenised.find_tokens(found._recipes["train"]) is None
    found.prepare(lambda line: None)
    assert [path.name.startswith(".") for path in cache.iterdir() if path.name != "sources"] == [False]


CHAT = {"format": "conversations"}
USER = '{"messages": [{"role": "user", "content": "a"}]}\n'
BAD = [
    (
        "a.jsonl",
        '{"text": "a"}\n{"body": "b", "id": 1}\n',
        {},
        "a.jsonl:2: no column \"text\", or it is null; it has 'body', 'id'; name",
    ),
    ("a.jsonl", '{"text": "a"}\n\n{"text": "b",}\n', {}, "a.jsonl:3: not JSON ("),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', {}, "a.jsonl:2: not UTF-8"),
    ("a.txt", b"abc\n\xe9\xe9", {}, "a.txt: not UTF-8 (invalid continuation byte at byte 4)"),
    ("a.txt", "abc".encode("utf-16-le"), {}, "a.txt: has NUL characters, so it is not UTF-8 text"),
    ("a.jsonl", "[1]\n", {}, "a.jsonl:1: list in place of a JSON object"),
    ("a.jsonl", '{"text": 5}\n', {}, 'a.jsonl:1: "text" is int in place of a text'),
    ("a.jsonl", "\n", {}, "a.jsonl: empty"),
    ("a.jsonl", '{"text": ""}\n', {}, "nothing to learn from: all documents are empty"),
    ("a.jsonl", USER + USER.replace("user", "x"), CHAT, "a.jsonl:2: the chat template fails: TemplateError: who is x"),
    ("a.jsonl", '{"messages": "hello"}\n', CHAT, 'a.jsonl:1: "messages" must be a list of messages'),
    ("a.jsonl", '{"prompt": "a"}\n', CHAT, 'a.jsonl:1: no column "messages" or "prompt and completion"'),
    ("a.jsonl", USER, CHAT | {"chat_template": "plain"}, "does not say which part is the answer"),
    ("a.jsonl", USER, CHAT | {"chat_template": "none"}, "chat_template: none cannot be read"),
    ("a.jsonl", USER, CHAT | {"packing": "concatenate"}, '"concatenate" joins texts'),
    ("a.parquet", b"PAR1", {}, "a.parquet: not a parquet file, truncated, or damaged ("),
    ("a.json", "{}", {}, "files of .jsonl, .parquet, .txt are read"),
]


def refusal(*arguments, **more):
    with pytest.raises((DataError, TaskError)) as caught:
        prepared(*arguments, **more)
    return str(caught.value)


def test_bad_files_are_named_with_their_line(tmp_path):
    words = tokenizer(tmp_path / "words")
    (tmp_path / "plain").write_text(TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    for name, content, section, message in BAD:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        said = refusal(name, words=words, **section)
        assert message in said
        assert "\n" not in said
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_what_is_no_file_of_rows_is_named(tmp_path, monkeypatch):
    import pyarrow as arrow
    from pyarrow import parquet

    assert "task.data.train: none*.jsonl: no such file" in refusal("none*.jsonl")
    (tmp_path / "folder").mkdir()
    assert "folder is a folder, but none that datasets.save_to_disk wrote" in refusal("folder")
    write_json(tmp_path / "folder" / "dataset_dict.json", {"splits": ["a", "b"]})
    assert "folder holds several data sets; name one of them: folder/a, folder/b" in refusal("folder")
    for name in ("a[1].jsonl", "a1.jsonl"):  # the first is a pattern that the second matches
        jsonl(tmp_path / name, [{"text": "a"}])
    assert documents.find_files("a[1].jsonl", "key") == [Path("a[1].jsonl")]
    jsonl(tmp_path / "good.jsonl", [{"text": "a"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert documents.find_files("~/g*.jsonl", "key") == [tmp_path / "good.jsonl"]
    assert "good.jsonl is named twice, by good.jsonl and g*.jsonl" in refusal(["good.jsonl", "g*.jsonl"])
    assert "good.jsonl is named twice, by good.jsonl and /" in refusal(["good.jsonl", str(tmp_path / "good.jsonl")])
    for columns, message in (
        (["body", "id"], ", row 0: no column \"text\", or it is null; it has 'body', 'id'"),
        (["text"] * 2, ": is there twice"),
    ):
        parquet.write_table(arrow.Table.from_arrays([arrow.array(["a"])] * 2, columns), tmp_path / "a.parquet")
        assert f"a.parquet{message}" in refusal("a.parquet").replace("a column ", "")


def test_a_token_beyond_the_vocabulary_and_a_tokenizer_without_an_end(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "a cat"}])
    words = tokenizer(tmp_path / "words")
    found = task("a.jsonl", words=words)
    found.pretrained_config.vocab_size = 20  # a tokenizer whose numbers have gaps
    with pytest.raises(DataError, match=r"a.jsonl:1: token \d+ is beyond the model's vocabulary of 20"):
        found.prepare(lambda line: None)
    with pytest.raises(DataError, match="has no eos_token"):
        prepared("a.jsonl", words=tokenizer(tmp_path / "endless", end=None))
    section = {"name": "causal-language-model", "model": LLAMA, "corpus": "synthetic", "data": {"train": "a.jsonl"}}
    with pytest.raises(TaskError, match='"corpus" and "data" both name the text'):
        build(Settings.model_validate(section), seed=1)


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])

    class Growing(TextEncoder):
        def encode(self, rows):
            yield from super().encode(rows)
            source.write_text(source.read_text() * 2)

    recipe = tokenised.Recipe((source,), Growing(None, "text"), "rows", 8, 257, "", str(tmp_path), "train")
    with pytest.raises(DataError, match="a file changed while it was read"):
        tokenised.make(recipe, print)
    assert tokenised.find_tokens(recipe) is None


def test_a_text_is_read_in_pieces_without_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 4)
    content, path = "\ufeffone\r\ntwo".encode(), tmp_path / "a.txt"
    path.write_bytes(content)
    assert "".join(row.value for row in documents.rows(path, ())) == "one\ntwo"
    path.write_bytes(content + b"\xff")
    with pytest.raises(DataError, match=r"not UTF-8 \(.* at byte 11\)"):
        list(documents.rows(path, ()))


def test_an_error_in_a_parquet_file_or_a_saved_set_names_the_row(tmp_path):
    """Counted over all that are read at a time."""
    for kind in ("parquet", "saved"):
        written(tmp_path / f"a.{kind}", [{"text": None if number == 511 else "a"} for number in range(600)])
        with pytest.raises(DataError, match=rf'a\.{kind}, row 511: no column "text", or it is null'):
            task(f"a.{kind}").prepare(lambda line: None)
