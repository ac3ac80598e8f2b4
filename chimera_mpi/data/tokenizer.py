"""How text becomes tokens and tokens text: bytes, or whatever a tokenizer.json says.

The library `tokenizers` is needed only to encode and decode by a tokenizer.json; what training must know of it, how
many tokens there are and which of them close a document or mask a word, is read from the JSON.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, refusing, shown
from . import byte_level

END_OF_DOCUMENT = 256  # where a byte is its own token
VOCABULARY = 257
TOKENIZER = "tokenizer.json"
END_NAMES = (byte_level.END_NAME, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
SPECIAL_NAMES = (("[CLS]", "[SEP]", "[MASK]", "[PAD]"), ("<s>", "</s>", "<mask>", "<pad>"))
PIECE = 1 << 16  # characters that are encoded at once
PIECES = 16  # that may be encoded side by side
CONTEXT = 8  # tokens that the spelling of the next one may depend on, where tokens are not bytes
LEARN_FROM_BYTES = 128 << 20

Tokens = NDArray[Any]


class Specials(NamedTuple):
    """The tokens that BERT adds to those of a corpus."""

    cls: int
    sep: int
    mask: int
    pad: int


def special_tokens(vocabulary: int = VOCABULARY) -> Specials:
    """They follow the tokens of the corpus: 257 to 260 where those are bytes."""
    return Specials(*range(vocabulary, vocabulary + len(Specials._fields)))


@dataclass(frozen=True)
class Tokenizer:
    """`json` is what the library `tokenizers` reads; without it, a byte is its own token.

    Token ids are below `vocabulary`; `specials` are there where they are among those.
    """

    vocabulary: int
    end_of_document: int
    specials: Specials | None = None
    json: str | None = field(default=None, repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """All but the JSON, for a file that has it elsewhere; see `from_facts`."""
        return {
            "kind": "byte" if self.json is None else "json",
            "sha256": None if self.json is None else _sha256(self.json),
            "vocabulary": self.vocabulary,
            "end_of_document": self.end_of_document,
            "special_tokens": self.specials,
        }

    @property
    def files(self) -> dict[str, bytes]:
        """What is kept of it beside a model that was trained on its tokens."""
        return {} if self.json is None else {TOKENIZER: self.json.encode()}

    def as_json(self, specials: Specials | None = None) -> str:
        """A tokenizer.json, also where a byte is its own token; with BERT's `specials`, if it has none of its own."""
        text = byte_level.tokenizer_json(self.end_of_document) if self.json is None else self.json
        if specials is None or self.specials:
            return text
        return byte_level.with_specials(text, dict(zip(SPECIAL_NAMES[0], specials, strict=True)))

    def encode(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """The tokens of a text that comes in parts, wherever it is cut, in arrays. Raises InputError."""
        if self.json is None:
            return (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
        return self._encoded_by_library(texts)

    def decoded(self, before: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """The text of `ids`, which follow the tokens `before`, bit by bit: a character once all its bytes are there.
        Raises InputError."""
        if self.json is None:
            return _utf8(bytes([number]) if number < END_OF_DOCUMENT else b"" for number in ids)
        library = _loaded(self.json)
        if (json.loads(self.json).get("decoder") or {}).get("type") == "ByteLevel":
            return _utf8(byte_level.bytes_of(library.id_to_token(number) or "") for number in ids)
        return _spelt(library, before, ids)

    def _encoded_by_library(self, texts: Iterable[str]) -> Iterator[Tokens]:
        assert self.json is not None
        library = _loaded(self.json)
        parts = pieces(texts, PIECE) if _may_be_cut(self.json) else filter(None, ["".join(texts)])
        while group := list(islice(parts, PIECES)):
            for encoding in library.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)


BYTES = Tokenizer(VOCABULARY, END_OF_DOCUMENT)


def from_facts(facts: Mapping[str, Any], text: str | None) -> Tokenizer:
    """What `facts` were taken of; `text` is its JSON. Raises ValueError if that is another, or not there."""
    if facts["kind"] != "byte" and (text is None or _sha256(text) != facts["sha256"]):
        raise ValueError("its tokenizer.json is not the one that was written")
    specials = Specials(*facts["special_tokens"]) if facts["special_tokens"] else None
    return Tokenizer(facts["vocabulary"], facts["end_of_document"], specials, None if facts["kind"] == "byte" else text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def from_json(text: str, where: str, end_name: str | None = None) -> Tokenizer:
    """That of a tokenizer.json, in which `end_name` closes a document. Raises InputError."""
    if text in (BYTES.as_json(), BYTES.as_json(special_tokens())):
        return BYTES
    with refusing(f"{where} is no tokenizer.json"):
        ids = _ids(json.loads(text))
        if odd := [token for token, number in ids.items() if type(number) is not int or not 0 <= number < 2**31]:
            raise ValueError(f"token {shown(odd[0])} has the number {shown(ids[odd[0]])}, which is not in [0, 2^31)")
        vocabulary = max(ids.values()) + 1
    names = (end_name,) if end_name else END_NAMES
    end = next((ids[name] for name in names if name in ids), None)
    if end is None:
        raise InputError(
            f"{where} has no token {' or '.join(names)}: name the one that closes a document by --end-token"
        )
    specials = (Specials(*map(ids.get, names)) for names in SPECIAL_NAMES if ids.keys() >= set(names))  # type: ignore
    return Tokenizer(vocabulary, end, next(specials, None), text)


def name_of(text: str, number: int) -> str:
    """How a tokenizer.json writes a token."""
    return next(name for name, found in _ids(json.loads(text)).items() if found == number)


def learn(size: int, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of at most `size` tokens, the commonest ones of `texts`. Raises InputError."""
    library = _library(f"bpe:{size}")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    learner = library.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[byte_level.END_NAME],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    return from_json(learner.to_str(), f"bpe:{size}")


def bpe_size(asked: str) -> int:
    """Of bpe:SIZE. Raises InputError."""
    size = asked.removeprefix("bpe:")
    if not size.isdecimal() or not VOCABULARY <= int(size) <= 10**7:
        raise InputError(f"{asked}: a BPE has from {VOCABULARY} (bytes and the end of a document) to 10000000 tokens")
    return int(size)


BEFORE_SPACE = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)


def pieces(texts: Iterable[str], size: int) -> Iterator[str]:
    """The same text in pieces of at most `size` characters, cut before white space, where tokenizers part words.

    Where it is cut depends on the text alone. Of words that are longer than a piece any character may be the last.
    """
    left = ""
    for text in texts:
        left += text
        start = 0
        while len(left) - start > size:
            found = BEFORE_SPACE.match(left, start, start + size + 1)
            end = found.end() if found else start + size
            yield left[start:end]
            start = end
        left = left[start:]
    if left:
        yield left


def _ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """By token. What is in none of the models' vocabularies is among those that are added."""
    vocabulary = settings["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram has pairs of a token and its logarithm
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in settings.get("added_tokens") or ()}}


def _library(what: str) -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(f"{what} needs the library tokenizers: pip install 'chimera-mpi[hf]'") from error
    return tokenizers


@lru_cache(maxsize=2)
def _loaded(text: str) -> Any:
    library = _library("a tokenizer.json")
    with refusing("the tokenizer.json cannot be loaded"):
        loaded = library.Tokenizer.from_str(text)
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True  # a text that spells one is a text
    return loaded


@lru_cache(maxsize=2)
def _may_be_cut(text: str) -> bool:
    """Whether a text cut before white space has the tokens of the whole; not where each text begins with a mark of its
    own, or a token reaches from a word into the white space after it."""
    library = _loaded(text)

    def tokens(*parts: str) -> list[int]:
        return [number for part in parts for number in library.encode(part, add_special_tokens=False).ids]

    return all(tokens(word, space + "a") == tokens(word + space + "a") for word in "a." for space in " \t\r\n")


def _utf8(parts: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for part in parts:
        yield decoder.decode(part)
    yield decoder.decode(b"", final=True)


def _spelt(library: Any, before: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """How a token is spelt may depend on those before it, such as whether a space comes first."""
    known = list(before[-CONTEXT:])
    told = library.decode(known, skip_special_tokens=False)
    for number in ids:
        known.append(number)
        text = library.decode(known, skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(told) :]
            known = known[-CONTEXT:]
            told = library.decode(known, skip_special_tokens=False)
    yield library.decode(known, skip_special_tokens=False)[len(told) :]
