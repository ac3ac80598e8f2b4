"""Token corpora: text becomes one HDF5 file; samples and micro-batches are read from it by rule.

`Batches` has samples for a model that predicts the next token, `MaskedBatches` for BERT.
"""

from .batches import Batches, even_sizes
from .corpus import PARTS, SCHEMA, Corpus, open_corpus
from .masked import AROUND_PAIR, IGNORED, MASKED_FRACTION, Masked, MaskedBatches
from .preparation import Prepared, Rules, prepare, unigram_entropy
from .sources import ERRORS, SUFFIXES
from .spool import BeingPrepared
from .tokenizer import (
    BYTES,
    END_OF_DOCUMENT,
    TOKENIZER,
    VOCABULARY,
    Specials,
    Tokenizer,
    from_facts,
    from_json,
    name_of,
    special_tokens,
)

__all__ = [
    "AROUND_PAIR",
    "BYTES",
    "END_OF_DOCUMENT",
    "ERRORS",
    "IGNORED",
    "MASKED_FRACTION",
    "PARTS",
    "SCHEMA",
    "SUFFIXES",
    "TOKENIZER",
    "VOCABULARY",
    "Batches",
    "BeingPrepared",
    "Corpus",
    "Masked",
    "MaskedBatches",
    "Prepared",
    "Rules",
    "Specials",
    "Tokenizer",
    "even_sizes",
    "from_facts",
    "from_json",
    "name_of",
    "open_corpus",
    "prepare",
    "special_tokens",
    "unigram_entropy",
]
