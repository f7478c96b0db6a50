"""``task`` of the ``dsframe`` section: tasks that few files name."""

from typing import Any, Literal

from dsframe.config.schema.base import Count, Section
from dsframe.config.schema.settings_images import ImageData


class LanguageTask(Section):
    """Language modelling over bytes with a GPT."""

    name: Literal["language"]
    """Kind of task."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads. Divides ``width``."""
    width: Count = 256
    """Hidden size."""
    context: Count = 128
    """Tokens in one sample; a token is a byte."""
    corpus: str = "stdlib"
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files: a path or a pattern."""
    samples: Count | None = None
    """Use only so many training samples. Default: all."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""


class TextFiles(Section):
    """Text or conversations from files, tokenised once and then read from a memory-mapped file."""

    train: str | list[str]
    """Files or patterns, such as ``["a/*.jsonl", "b.parquet", "c/*.txt"]``: JSON lines, parquet,
    text (one document a file), or a folder that ``datasets.save_to_disk`` wrote."""
    eval: str | list[str] | None = None
    """Validation data. Default: none, so there is no evaluation."""
    format: Literal["text", "conversations"] = "text"
    """``conversations``: rows have ``messages``, or ``prompt`` and ``completion``, and only the answers are learned."""
    field: str = "text"
    """Column of the text, in JSON lines, parquet and saved folders."""
    packing: Literal["concatenate", "rows", "documents"] | None = None
    """``concatenate``: all documents joined, cut into rows of ``context`` tokens. ``rows``: one document a row, padded to the
    longest of its micro-batch. ``documents``: as many as fit into ``context``; they do not see each other. Default:
    ``concatenate`` for text, ``rows`` for conversations."""
    chat_template: str | None = None
    """File with a chat template, in place of the tokenizer's own. It marks the answers by ``{% generation %}``."""


class CausalLanguageModelTask(Section):
    """Language modelling with a model of Hugging Face transformers (``AutoModelForCausalLM``)."""

    name: Literal["causal-language-model"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object, ``{"model_type": "llama", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class, its own defaults for the rest. Or a local folder with a model, or ``hub:NAME@REVISION``, one of the
    Hugging Face hub (its cache is read, and filled where there is a network): its weights are the first ones."""
    resize_embeddings: bool = False
    """Resize the embeddings of a pretrained model to a larger tokenizer. New rows are drawn around the mean of the old."""
    tokenizer: str | None = None
    """Local folder or ``hub:NAME`` of a tokenizer. Default: the model folder's, where it has one, else a token is a byte."""
    context: Count = 128
    """Tokens in one sample."""
    corpus: str = "stdlib"
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files: a path or a pattern. Tokenised
    in memory at each start: for large texts write ``data``, not beside this key."""
    data: TextFiles | None = None
    """Documents or conversations, instead of ``corpus``."""
    data_dir: str | None = None
    """Folder in which tokens are cached. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    samples: Count | None = None
    """Use only so many training samples. Default: all."""


class ImageClassificationTask(ImageData):
    """Image classification with a model of Hugging Face transformers (``AutoModelForImageClassification``)."""

    name: Literal["image-classification"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object, ``{"model_type": "vit", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class, sized for the data set. Or a local folder with a model, or ``hub:NAME@REVISION``: its weights are the first
    ones, and the output layer is a new one where the classes differ."""
