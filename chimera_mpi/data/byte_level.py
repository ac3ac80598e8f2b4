"""Bytes as the library `tokenizers` writes them: each as one printable character, in tokens and in tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

END_NAME = "<|endoftext|>"
PRINTABLE = frozenset([*range(33, 127), *range(161, 173), *range(174, 256)])


@cache
def characters() -> tuple[str, ...]:
    """By byte: itself where it can be seen, and the next one from 256 on where not."""
    others = count(256)
    return tuple(chr(byte if byte in PRINTABLE else next(others)) for byte in range(256))


@cache
def _bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(characters())}


def bytes_of(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for."""
    table = _bytes()
    return bytes(table[character] for character in token) if table.keys() >= set(token) else token.encode()


def tokenizer_json(end_of_document: int) -> str:
    """A tokenizer.json by which each byte is its own token."""
    settings: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(end_of_document, END_NAME)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {**_bytes(), END_NAME: end_of_document},
            "merges": [],
        },
    }
    return json.dumps(settings, ensure_ascii=False)


def with_specials(text: str, specials: Mapping[str, int]) -> str:
    """A tokenizer.json that also has BERT's tokens, and puts them around a text or two as BERT does. `specials` has the
    numbers of [CLS], [SEP], [MASK] and [PAD], which follow the vocabulary."""
    settings = json.loads(text)
    settings["added_tokens"] += [added_token(number, name) for name, number in specials.items()]
    cls, first, second, sep, end = (
        _piece("SpecialToken", "[CLS]", 0),
        _piece("Sequence", "A", 0),
        _piece("Sequence", "B", 1),
        _piece("SpecialToken", "[SEP]", 0),
        _piece("SpecialToken", "[SEP]", 1),
    )
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [cls, first, sep],
        "pair": [cls, first, sep, second, end],
        "special_tokens": {
            name: {"id": name, "ids": [specials[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
        },
    }
    return json.dumps(settings, ensure_ascii=False)


def _piece(kind: str, name: str, segment: int) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": segment}}


def added_token(number: int, content: str) -> dict[str, Any]:
    """A special token's entry in a tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **plain, "special": True}
