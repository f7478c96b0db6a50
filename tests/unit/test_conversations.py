"""What is learned of a conversation is what was meant: answers by their tokens, weights, templates, the same rows from any file."""

import itertools
import json

import numpy as np
import pytest

from dsframe.data import documents
from dsframe.data.documents import Row
from dsframe.data.encoders import ConversationEncoder as encoder  # noqa: N813
from dsframe.data.encoders import TextEncoder, describe_targets
from dsframe.errors import DataError
from tests.text_files import jsonl

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot>{% generation %}{{ m['content'] }}[END]{% endgeneration %}"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
)
SPECIAL = ["[UNK]", "[END]", "<user>", "<bot>", "<s>"]
WORDS = ["one", "two", "good", "bad", "the", "cat", "sees", "a", "dog", "naïve", "🐈", "end"]


def byte_words(special, **names):
    """A tokenizer of bytes, and of special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def words(kind):
    """A tokenizer of a kind: bytes, pieces of words, or whole words that drop all whitespace."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "bytes":
        return byte_words(SPECIAL, unk_token="[UNK]", eos_token="[END]")
    letters = sorted({letter for word in WORDS for letter in word})
    if kind == "pieces":
        vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *WORDS]
        made = Tokenizer(
            models.WordPiece({word: number for number, word in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]")
        )
        made.normalizer = normalizers.Strip()
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.WordPiece()
    else:
        scores = [(word, -1.0) for word in [*SPECIAL, "▁", "\n", *letters]]
        made = Tokenizer(models.Unigram([*scores, *((f"▁{word}", -0.5) for word in WORDS)], unk_id=0))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    made.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="[END]")


def talk(*answers, **more):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": " the cat "}, answer if isinstance(answer, dict) else said(answer)]
    return {"messages": messages, **more}


def said(text, role="assistant", **more):
    return {"role": role, "content": text, **more}


def encoded(made, row, place="a:1"):
    (found,) = made.encode([Row(place, row)])
    return found.tolist()


def tokens_of(made, row):
    """Those that are learned and the others."""
    return [max(token, ~token) for token in encoded(made, row)]


def learned(tokenizer, row, template=MARKED):
    found = encoded(encoder(tokenizer, template), row)
    return str(tokenizer.decode([token for token in found if token >= 0], skip_special_tokens=False))


PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_token_of_a_prompt_is_not_learned_where_an_answer_makes_other_tokens_of_it(kind):
    """Without words as a first step: "ab" is one token, and "abc" is "a" and "bc"."""
    from tokenizers import Tokenizer, models

    if kind == "bpe":
        vocabulary = {text: number for number, text in enumerate(["</s>", *"abcx", "bc", "ab"])}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c"), ("a", "b")]))
    else:
        scores = {"</s>": 0.0, "a": -1.0, "b": -3.0, "c": -3.0, "x": -1.0, "ab": -1.5, "bc": -1.0}
        made = Tokenizer(models.Unigram([*scores.items()], unk_id=0))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")

    def learned_tokens(row):
        return [tokenizer.decode([token]) for token in encoded(encoder(tokenizer, PLAIN), row) if token >= 0]

    assert learned_tokens({"prompt": "xab", "completion": "cx"}) == ["bc", "x", "</s>"]
    asked, more = {"role": "user", "content": "xab"}, {"role": "user", "content": "c"}
    assert learned_tokens({"messages": [asked, said("cx")]}) == ["bc", "x"]
    assert learned_tokens({"messages": [asked, said("cab"), more]}) == ["bc", "a", "bc"]
    assert learned_tokens({"messages": [{**more, "content": "xa"}, said(""), {**more, "content": "b"}]}) == []


TURNS = (
    "{% if tools %}<user>{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
    "{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}[END]"
    "{% endgeneration %}{% else %}<user>{{ m.role }} {{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["bytes", "pieces", "unigram"])
def test_the_targets_of_a_file_are_its_answers_byte_for_byte(kind, tmp_path):
    """Tools, system prompts, several turns, empty answers and emoji; a special token ends each answer."""
    tools = [{"type": "function", "function": {"name": "sees", "parameters": {}}}]
    calls = [{"type": "function", "function": {"name": "sees", "arguments": {"what": "🐈"}}}]
    system = {"role": "system", "content": "good  cat 🐈\n"}
    rows = [
        {**talk("sees a dog", "", "naïve 🐈"), "tools": tools},
        {"messages": [system, *talk("🐈 🐈", "one two")["messages"]]},
        {"messages": [system, {"role": "user", "content": "the dog"}, said("", tool_calls=calls),
                      {"role": "tool", "content": "one\r\n"}, said("the cat sees one")], "tools": json.dumps(tools)},
        talk(""),
    ]  # fmt: skip
    answers = [["sees a dog", "", "naïve 🐈"], ["🐈 🐈", "one two"], ["sees", "the cat sees one"], [""]]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=number > 1) + "\n" for number, row in enumerate(rows))
    )
    tokenizer = words(kind)
    made = encoder(tokenizer, TURNS)
    for tokens, expected in zip(
        made.encode(list(documents.rows(tmp_path / "a.jsonl", made.columns))), answers, strict=True
    ):
        groups = [[]]
        for token in tokens[tokens >= 0].tolist():
            groups.append([]) if token == tokenizer.eos_token_id else groups[-1].append(token)
        assert [tokenizer.decode(group) for group in groups] == [*expected, ""]


def test_what_is_learned_is_shown_and_an_answer_without_an_end_is_said():
    tokenizer = words("bytes")
    for behind, warned in (
        ("[END]{% endgeneration %}", 0),
        ("[END]\n {% endgeneration %}", 0),
        ("{% endgeneration %}[END]", 1),
    ):
        template = MARKED.replace("[END]{% endgeneration %}", behind)
        rows = list(encoder(tokenizer, template).encode([Row("a:1", talk("one", "x" * 200)), Row("a:2", talk("two"))]))
        lines = list(describe_targets(tokenizer, rows, 1000))
        assert lines[1].startswith('learned of a row: "two')
        assert lines[0].endswith('x" ...')
        assert ["does not learn to stop" in line for line in lines[2:]] == [True] * warned
    cut = rows[1][: int((rows[1] >= 0).nonzero()[0][1])]
    assert len(list(describe_targets(tokenizer, [cut], len(cut) - 1))) == 1  # cut within its answer
    unknown, end = np.array([tokenizer.unk_token_id]), np.array([tokenizer.eos_token_id])
    assert len(list(describe_targets(tokenizer, [unknown, end], 1))) == 3


def test_an_answer_that_shares_a_token_with_other_words_is_refused():
    glued = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    row = {"messages": [said("one"), said("Q")]}  # one unknown word
    with pytest.raises(DataError, match="a:1: the tokens of an answer cannot be found: 'one"):
        learned(words("pieces"), row, glued)


@pytest.mark.parametrize("within", ["{% set t %}#{% endset %}{{ t }}", "{% macro w(m) %}#{% endmacro %}{{ w(m) }}"])
def test_an_answer_is_learned_wherever_a_template_writes_it(within):
    """The positions that transformers counts within a variable or a macro are not those of the text."""
    one = "<user>{{ m.role }}{%- generation -%} {{ m.content }}[END] {%- endgeneration +%}"
    template = "{% for m in messages %}" + within.replace("#", one) + "{% endfor %}"
    assert learned(words("bytes"), {"messages": [said("one"), said("two")]}, template) == "one[END]two[END]"


@pytest.mark.parametrize("change", ["t | trim", "t.split(' ')[0]"])
def test_an_answer_that_the_template_changes_afterwards_is_refused(change):
    """Also where a mark is lost and no text."""
    marked = "{% generation %}{{ m.content }} {% endgeneration %}"
    late = "{% for m in messages %}{% set t %}" + marked + "{% endset %}{{ " + change + " }}{% endfor %}"
    with pytest.raises(DataError, match=r"a:1: the chat template changes what .*write the marks where it prints"):
        learned(words("bytes"), {"messages": [said("one")]}, late)


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_message_of_no_weight_is_not_learned(key):
    tokenizer = words("bytes")
    assert learned(tokenizer, talk(said("bad", **{key: 0}), said("good", **{key: True}))) == "good[END]"
    with pytest.raises(DataError, match=f'"{key}" of a message is 0.5; 0 and 1 are known'):
        learned(tokenizer, talk(said("bad", **{key: 0.5})))


def test_a_weight_that_cannot_be_heeded_is_refused():
    tokenizer, marked = words("bytes"), MARKED.replace("'assistant'", "'gpt'")
    rows = talk(said("bad", weight=0, role="gpt"), said("good", role="gpt"))
    assert learned(tokenizer, rows, marked) == "good[END]"
    with pytest.raises(DataError, match="2 answers, but the chat template marks 4 parts"):
        learned(tokenizer, rows, marked * 2)
    ask = {"role": "user", "content": "the cat"}
    completion = {"prompt": [ask], "completion": [said("bad", weight=0), ask, said("good")]}
    with pytest.raises(DataError, match="a:1: a message of a completion has the weight 0; give messages"):
        learned(tokenizer, completion)
    with pytest.raises(DataError, match="a:1: a prompt or a completion has no message"):
        learned(tokenizer, {**completion, "completion": []})
    completion["completion"] = [said("good", weight=None)]
    assert learned(tokenizer, completion, "{% for m in messages %}{{ m | tojson }}{% endfor %}").count("weight") == 0


def test_prompt_and_completion_are_one_text():
    tokenizer = words("unigram")  # writes a space before each text
    row = {"prompt": "the", "completion": "n a"}
    whole = tokenizer("then a")["input_ids"]
    assert tokens_of(encoder(tokenizer, None), row) == [*whole, tokenizer.eos_token_id]
    assert learned(tokenizer, row, None).replace(" ", "") == "na[END]"
    with pytest.raises(DataError, match="the tokenizer has no eos_token"):
        learned(byte_words(SPECIAL, unk_token="[UNK]"), row, None)


def test_a_space_that_ends_an_answer_is_learned_with_the_word_that_it_begins():
    assert learned(words("unigram"), {"messages": [said("the "), said("cat", "user")]}, PLAIN) == "the cat"


@pytest.mark.parametrize("special", ["$A [END]", "<user> <bot> $A", "<s> <bot> $A [END]", "$A"])
def test_a_text_begins_as_the_tokenizer_begins_it(special):
    from tokenizers.processors import TemplateProcessing

    tokenizer = words("bytes")
    tokenizer.bos_token = "[END]" if special == "$A [END]" else "<s>"
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in SPECIAL]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=special, special_tokens=ids)
    theirs = [*tokenizer("one")["input_ids"]]
    theirs += [tokenizer.eos_token_id] * (theirs[-1] != tokenizer.eos_token_id)
    assert encoded(TextEncoder(tokenizer, "text"), {"text": "one"}) == theirs
    pieces = [Row("a", "o", last=False), Row("a", "ne", last=False), Row("a", ""), Row("b", "one")]
    assert [*itertools.chain(*TextEncoder(tokenizer, "text").encode(pieces))] == [*theirs, *theirs]
    assert tokens_of(encoder(tokenizer, None), {"prompt": "o", "completion": "ne"}) == theirs


def test_a_vocabulary_without_letters_begins_as_any_other():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(models.WordLevel({"[S]": 0, "[END]": 1, "ACG": 2, "GGT": 3}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[S]", "[END]"])
    made.post_processor = TemplateProcessing(single="[S] $A", special_tokens=[("[S]", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[END]", bos_token="[S]")
    assert encoded(TextEncoder(tokenizer, "text"), {"text": "ACG"}) == [0, 2, 1]


def test_what_the_template_is_given_reaches_it():
    template = "{{ mood }}{{ eos_token }}{{ tools[0]['name'] if tools is not none else '' }}" + MARKED
    tokenizer, row = words("bytes"), talk("one", chat_template_kwargs={"mood": "calm"})
    made = encoder(tokenizer, template)
    assert tokenizer.decode(tokens_of(made, {**row, "tools": []})).startswith("calm[END]<user>")
    for tools in ([{"name": "find", "more": None}], json.dumps([{"name": "find"}])):
        assert tokenizer.decode(tokens_of(made, {**row, "tools": tools})).startswith("calm[END]find")


DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}{{ date_string }}" + MARKED
)


@pytest.mark.parametrize("several", [False, True])
def test_tokens_do_not_depend_on_the_day(several):
    """A template that writes the date gets none, and takes its own, or the row's."""
    tokenizer, row = words("bytes"), talk("one")
    template = {"default": DATED} if several else DATED
    made = encoder(tokenizer, template)
    assert made.dated
    assert not encoder(tokenizer, MARKED).dated
    asked = {"prompt": [said("one", "user")], "completion": [said("two")]}
    dated = {**row, "chat_template_kwargs": {"date_string": "1 May 2025"}}
    for given, date in ((row, "26 Jul 2024"), (asked, "26 Jul 2024"), (dated, "1 May 2025")):
        assert tokenizer.decode(tokens_of(made, given)).startswith(date)
    with pytest.raises(
        DataError, match=r"a:1: the chat template fails: it needs the day's date .*; write a date in its place"
    ):
        learned(tokenizer, row, "{{ strftime_now('%Y') }}" + MARKED)


def test_of_several_templates_the_one_that_transformers_takes():
    tokenizer = words("bytes")
    tokenizer.chat_template = {"default": MARKED, "tool_use": f"tools{MARKED}"}
    for row in (talk("one"), talk("one", tools=[{"name": "find"}])):
        theirs = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=True)["input_ids"]
        assert tokens_of(encoder(tokenizer, None), row) == theirs
    tokenizer.chat_template = {"other": MARKED}
    with pytest.raises(DataError, match="of the chat templates other none is the default"):
        learned(tokenizer, talk("one"), None)


def test_nulls_of_parquet_are_not_said_and_those_of_json_are(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    call = "{% for m in messages %}{% for c in m.calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    rows = [{"messages": [said("", calls=[{"name": "a", "arguments": given}])]} for given in ({"x": 1}, {"y": "two"})]
    jsonl(tmp_path / "a.jsonl", rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = encoder(words("bytes"), call + "{% generation %}{% endgeneration %}")
    found = [
        [tokens.tolist() for tokens in made.encode(list(documents.rows(tmp_path / name, made.columns)))]
        for name in ("a.jsonl", "a.parquet")
    ]
    assert found[0] == found[1]
    rows[0]["messages"][0]["calls"][0]["arguments"] = {"x": None}
    assert '"arguments": {"x": null}' in words("bytes").decode(tokens_of(made, rows[0]))


def test_a_column_of_json_is_what_was_written(tmp_path):
    """As ``datasets`` makes it of arguments of different kinds: text in parquet, and its nulls are not Arrow's."""
    import datasets

    calls = [{"name": "a", "arguments": {"x": 1, "y": None}}, {"name": "b", "arguments": "z"}]
    rows = [{"messages": [said("", calls=calls)], "tools": [{"parameters": {"default": None}}]}]
    features = {"messages": datasets.List(datasets.Json()), "tools": datasets.List({"parameters": datasets.Json()})}
    saved = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(str(tmp_path / "a.parquet"))
    for name in ("saved", "a.parquet"):
        assert [row.value for row in documents.rows(tmp_path / name, ["messages", "tools"])] == rows


def test_a_map_of_parquet_is_an_object(tmp_path):
    """As other programs write arguments of calls; pyarrow gives its pairs."""
    import pyarrow as arrow
    from pyarrow import parquet

    kind = arrow.list_(arrow.struct([("role", arrow.string()), ("at", arrow.map_(arrow.string(), arrow.string()))]))
    rows = [[{"role": "user", "at": [("a", "one"), ("b", None)]}, {"role": "user", "at": []}]]
    parquet.write_table(arrow.table({"messages": arrow.array(rows, kind)}), tmp_path / "a.parquet")
    (row,) = documents.rows(tmp_path / "a.parquet", ["messages"])
    assert row.value == {"messages": [{"role": "user", "at": {"a": "one"}}, {"role": "user", "at": {}}]}


def test_parts_of_text_are_one_text_and_other_parts_are_refused():
    tokenizer, parts = words("bytes"), [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]
    assert learned(tokenizer, talk(said({"a": 1}, "tool"), said(parts))) == "one[END]"
    with pytest.raises(DataError, match="a:1: a message has parts of type image; texts are read"):
        learned(tokenizer, talk(said([{"type": "image"}, *parts])))
    with pytest.raises(DataError, match=r"\"content\" of a message is an object, \{'text': 'x'\}; give its text"):
        learned(tokenizer, talk(said({"text": "x"})))


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "\ud83d"}, talk("\ude00")])
def test_half_of_a_character_is_named(row):
    rows = [Row("a:1", {"prompt": "a", "completion": "😀"}), Row("a:2", row)]
    with pytest.raises(DataError, match=r"^a:2: .*'.ud[8e][30][d0]' is half of a character"):
        list(encoder(words("bytes"), MARKED).encode(rows))
    assert encoded(TextEncoder(None, "text"), {"text": "\ud83d"}) == [0xED, 0xA0, 0xBD, 256]  # bytes can have it


def test_a_mark_of_an_editor_is_no_text_and_a_key_is_there_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert [row.value for row in documents.rows(tmp_path / "a.txt", ())] == ["one\ntwo\n"]
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "one", "text": "two"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:2: .*"text" is there twice'):
        list(documents.rows(tmp_path / "a.jsonl", ("text",)))


def test_ends_that_a_text_brings_are_not_written_twice():
    from tokenizers.processors import TemplateProcessing

    tokenizer = words("bytes")
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    plain = encoded(TextEncoder(tokenizer, "text"), {"text": "one"})
    assert encoded(TextEncoder(tokenizer, "text"), {"text": "<s>one[END]"}) == plain
    assert (plain[0], plain[-1]) == (start, tokenizer.eos_token_id)
    pairs = encoder(tokenizer, "")
    brought = {"prompt": "<s>the", "completion": "cat[END]"}
    assert encoded(pairs, brought) == encoded(pairs, {"prompt": "the", "completion": "cat"})


def test_a_null_is_a_key_that_is_not_there():
    """As transformers takes it; it was an error of the tokenizer."""
    tokenizer = words("bytes")
    assert learned(tokenizer, {"messages": [said("the", "user"), said(None, tool_calls=None)]}) == "[END]"


def test_what_the_template_does_not_write_is_said_once():
    call = [{"function": {"name": "f", "arguments": {}}}]
    row = talk(said("one", tool_calls=call, masked=True, name=None), tools=[{"type": "function"}], system="be")
    # Of which one is a column too, one is a part of "generation", one is false, and one is empty.
    row["messages"][1] |= {"system": "be", "gene": 1, "learn": False, "audio": []}
    rows = [Row("a:1", row), Row("a:2", row)]
    made = encoder(words("bytes"), MARKED)
    assert len(list(made.encode(rows))) == 2
    assert made.warnings == [
        "a:1: columns that are not read: system",
        "a:1: not in the chat template, so not read: gene, learn, masked, system, tool_calls, tools",
    ]


def test_calls_and_thoughts_that_a_template_leaves_out_are_said():
    """It knows their keys, and writes them of the last message alone, or where there is no content."""
    call = [{"type": "function", "function": {"name": "look", "arguments": {"at": "the cat"}}}]
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot>{% generation %}"
        "{% if loop.last and m['reasoning_content'] %}{{ m['reasoning_content'] }}{% endif %}"
        "{% if m['content'] %}{{ m['content'] }}{% else %}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}"
        "{% endfor %}{% endif %}[END]{% endgeneration %}{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    )
    rows = encoder(words("bytes"), template)
    encoded(rows, talk(said("sees"), said("", reasoning_content="a dog", tool_calls=call)))
    assert not rows.warnings
    encoded(rows, talk(said("sees", tool_calls=call), said("one")), "f:2")
    encoded(rows, talk(said("sees", reasoning_content="a dog"), said("one")), "f:3")
    what = "the chat template leaves out or changes words of messages of: assistant"
    assert rows.warnings == [f"f:2: {what} (tool_calls)", f"f:3: {what} (reasoning_content)"]


CHAT = (
    "{% for m in messages if m['role'] in ['user', 'assistant'] %}<{{ m['role'] }}>{{ m['content'] }}[END]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_is_asked_in_a_completion_is_no_answer():
    asked, answer, tokenizer = said("the cat", "user"), said("sees"), words("bytes")
    assert learned(tokenizer, {"prompt": [asked], "completion": [answer]}, CHAT) == "sees[END]"
    with pytest.raises(DataError, match="a:1: a completion has messages of user, which would be learned"):
        learned(tokenizer, {"prompt": [asked], "completion": [answer, asked, answer]}, CHAT)
    with pytest.raises(DataError, match="a:1: the chat template writes the prompt differently if a completion follows"):
        learned(tokenizer, {"prompt": [asked], "completion": [answer]}, CHAT + "{{ messages | length }}")


def test_words_that_a_template_leaves_out_are_said():
    asked, answer = said(" the cat\n", "user"), said("sees")
    rows = encoder(words("bytes"), CHAT)
    encoded(rows, {"prompt": [asked], "completion": [answer]})
    assert not rows.warnings
    encoded(rows, {"prompt": [said("a dog", "system"), asked], "completion": [answer, said("good", "critic")]}, "f:2")
    assert rows.warnings == ["f:2: the chat template leaves out or changes words of messages of: critic, system"]
    rows = encoder(words("bytes"), MARKED.replace("m['content'] }}[END]", "m['content'][:2] }}[END]"))
    encoded(rows, {"messages": [asked, answer], "prompt": "one", "completion": "two"}, "f:3")
    assert rows.warnings == [
        "f:3: columns that are not read: completion, prompt",
        "f:3: the chat template leaves out or changes words of messages of: assistant",
    ]
