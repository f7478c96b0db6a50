"""Sections of ``dsframe.task`` for text tasks and transformers models."""

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
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files (path or pattern)."""
    samples: Count | None = None
    """Number of training samples. Default: all."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""


class TextFiles(Section):
    """Text or conversations from files, tokenised once and then read from a memory-mapped file."""

    train: str | list[str]
    """Files or patterns, such as ``["a/*.jsonl", "b.parquet", "c/*.txt"]``: JSON lines, parquet, text (one document per
    file), or a folder written by ``datasets.save_to_disk``."""
    eval: str | list[str] | None = None
    """Validation data. Default: none, and no evaluation."""
    format: Literal["text", "conversations"] = "text"
    """``conversations``: rows have ``messages``, or ``prompt`` and ``completion``; only the answers count in the
    loss."""
    field: str = "text"
    """Column of the text in JSON lines, parquet and saved folders."""
    packing: Literal["concatenate", "rows", "documents"] | None = None
    """``concatenate``: all documents joined, then split into rows of ``context`` tokens. ``rows``: one document per
    row, padded to the longest of the micro-batch. ``documents``: as many as fit into ``context``, without attention
    between them. Default: ``concatenate`` for text, ``rows`` for conversations."""
    chat_template: str | None = None
    """File with a chat template that replaces the tokenizer's. It marks the answers by ``{% generation %}``."""


class CausalLanguageModelTask(Section):
    """Language modelling with a model of Hugging Face transformers (``AutoModelForCausalLM``)."""

    name: Literal["causal-language-model"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object ``{"model_type": "llama", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class and its defaults. Or a local folder, or ``hub:NAME@REVISION`` for a model of the Hugging Face
    hub (cached, downloaded if there is a network): training starts from its weights."""
    resize_embeddings: bool = False
    """Resize a pretrained model's embeddings to a larger tokenizer. New rows are drawn around the mean of the old."""
    tokenizer: str | None = None
    """Local folder or ``hub:NAME`` of a tokenizer. Default: the model folder's if any, else a token is a byte."""
    context: Count = 128
    """Tokens in one sample."""
    corpus: str = "stdlib"
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files (path or pattern). Tokenised
    in memory at each start; for large texts use ``data`` instead."""
    data: TextFiles | None = None
    """Documents or conversations, instead of ``corpus``."""
    data_dir: str | None = None
    """Folder of the token cache. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    samples: Count | None = None
    """Number of training samples. Default: all."""


class ImageClassificationTask(ImageData):
    """Image classification with a model of Hugging Face transformers (``AutoModelForImageClassification``)."""

    name: Literal["image-classification"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object ``{"model_type": "vit", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class, sized for the data set. Or a local folder, or ``hub:NAME@REVISION``: training starts from its
    weights, with a new output layer if the classes differ."""
