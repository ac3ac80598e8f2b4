"""What the layers of a model do with a sample, and what they hold meanwhile: closed forms for GPT and BERT.

All follow from how torch computes the layers of models/gpt.py and models/bert.py. Counted are the tensors that its
autograd keeps, not what allocators add. In the size of its input, [tokens, hidden], a transformer block keeps 16
tensors: the inputs of its two LayerNorms, those of its four linear layers (1 + 1 + 1 + 4), queries, keys and values
(3), what GELU takes (4), less the one that attention and the layer behind it share; dropout and attention that is not
fused keep more. Of these 9 enter the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import InputError
from ..schedule import nearest

PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
STATE_NUMBERS = {"adamw": 2, "lamb": 2, "sgd": 1, "adafactor": 0}  # of a parameter; adafactor's are of rows and columns
COUNT_BYTES = 8  # the number of targets, which rides back with the gradients
INDEX_BYTES = 8  # of a token id
MASKED_SHARE = 0.15  # of BERT's tokens


@dataclass(frozen=True)
class LayerWork:
    """What a layer does with one sample, and what it holds. Bytes are of the precision that `Work` was made for.

    The gradient of its largest matrix, of `matrix_bytes`, is apart for a moment before it is added to that of the
    step, whatever the number of samples. What else the backward then has may be less than the most it ever has.
    """

    kind: str  # layers of a kind are alike
    parameters: int  # a tied copy counts
    forward_flops: float  # per sample; multiply-adds are 2, and causal attention counts in full
    backward_flops: float  # per sample, of both halves
    input_bytes: float  # per sample: what is kept under recomputation, and what travels if a stage begins here
    output_bytes: float  # per sample
    activation_bytes: float  # per sample: what autograd keeps for the backward, its input included
    deferred_bytes: float  # per sample: what is left of that between the halves of a split backward, gradients included
    working_bytes: float  # per sample: the most that its backward has in addition, the output's gradient included
    matrix_bytes: float = 0
    beside_matrix_bytes: float = 0  # per sample: what the backward has in addition while it has `matrix_bytes`
    input_working_bytes: float | None = None  # as `working_bytes`, of the first half of a split backward; or the same

    def backward_peak_bytes(self, samples: float) -> float:
        """The most that its backward has in addition to what is kept."""
        return max(samples * self.working_bytes, samples * self.beside_matrix_bytes + self.matrix_bytes)


@dataclass(frozen=True)
class Work:
    """A model as its layers. Bytes are those of one parameter."""

    layers: tuple[LayerWork, ...]
    parameter_bytes: int  # in the precision that is computed in
    master_bytes: int  # of a copy in single precision beside it, or 0
    gradient_bytes: int  # of what adds up and is summed over replicas
    state_bytes: int  # of the optimizer
    count_bytes: float = COUNT_BYTES  # what a message on the way back has beside gradients, whatever the samples
    tied_parameters: int = 0  # that the last layer shares with the first: one copy where a stage has both

    @cached_property
    def parameters(self) -> int:
        """How many numbers the model learns, tied ones counted once."""
        return sum(layer.parameters for layer in self.layers) - self.tied_parameters

    @cached_property
    def flops(self) -> float:
        """Of forward and backward of one sample."""
        return sum(layer.forward_flops + layer.backward_flops for layer in self.layers)


def work_in(layers: Sequence[LayerWork], precision: str, optimizer: str, momentum: float, tied: int = 0) -> Work:
    """The work of these layers, trained like that. Raises InputError for a precision or an optimizer that is not."""
    size = _of(PRECISION_BYTES, "precision", precision)
    single = max(size, 4)
    numbers = _of(STATE_NUMBERS, "optimizer", optimizer) * (optimizer != "sgd" or momentum > 0)
    return Work(
        layers=tuple(layers),
        parameter_bytes=size,
        master_bytes=single if size < 4 else 0,
        gradient_bytes=single,
        state_bytes=single * numbers,
        tied_parameters=tied,
    )


@dataclass(frozen=True)
class Numbers:
    """The bytes of what layers keep: numbers, statistics of a LayerNorm, sums, and marks of a dropout that is on.

    `fused` attention keeps, of its scores, one sum for each token; otherwise they are kept whole, in single precision
    at least. Torch fuses it, except on the CPU with dropout, and on a GPU in double precision.
    """

    number: int
    statistic: int
    sum: int
    mark: int
    fused: bool

    @staticmethod
    def of(precision: str, dropout: float, device: str, fused: bool | None) -> Numbers:
        size = _of(PRECISION_BYTES, "precision", precision)
        on_cpu = device == "cpu"
        as_torch = not dropout if on_cpu else size < 8
        return Numbers(
            number=size,
            statistic=size if on_cpu else max(size, 4),
            sum=max(size, 4),
            mark=(size if on_cpu else 1) if dropout else 0,
            fused=as_torch if fused is None else fused,
        )


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A GPT or BERT, and how it is trained: on a `device`, "cpu" or "cuda"; `fused`: see `Numbers`.

    What follows from these is of one sample.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    sequence_length: int
    tied: bool = True
    dropout: float = 0.0
    precision: str = "fp32"
    optimizer: str = "adamw"
    momentum: float = 0.9
    device: str = "cpu"
    fused: bool | None = None

    @cached_property
    def of(self) -> Numbers:
        return Numbers.of(self.precision, self.dropout, self.device, self.fused)

    @property
    def values(self) -> int:
        """How many [tokens, hidden] are."""
        return self.sequence_length * self.hidden

    @property
    def width_bytes(self) -> int:
        """Of [tokens, hidden]."""
        return self.values * self.of.number

    @property
    def mark_bytes(self) -> int:
        """What dropout marks of these."""
        return self.values * self.of.mark

    @property
    def statistic_bytes(self) -> int:
        """Of a LayerNorm."""
        return 2 * self.sequence_length * self.of.statistic

    @property
    def index_bytes(self) -> int:
        return INDEX_BYTES * self.sequence_length

    @property
    def logits(self) -> int:
        """How many [tokens, vocabulary] are."""
        return self.sequence_length * self.vocabulary


def gpt_work(model: Transformer) -> Work:
    """Of `models.gpt`, its loss included. Raises InputError."""
    return _work(model, _gpt_embedding(model), _gpt_head(model), held=9)


def bert_work(model: Transformer, segments: int = 2, masked: int | None = None) -> Work:
    """Of `models.bert`, without a mask, and its loss, for which `masked` tokens of a sample are to be found: by default
    15 %. Raises InputError."""
    found = max(1, round(MASKED_SHARE * model.sequence_length)) if masked is None else masked
    return _work(model, _bert_embedding(model, segments), _bert_head(model, found), held=10)


def _work(model: Transformer, embedding: LayerWork, head: LayerWork, held: int) -> Work:
    layers = (embedding, *[_block(model, held)] * model.layers, head)
    tied = model.vocabulary * model.hidden if model.tied else 0
    return work_in(layers, model.precision, model.optimizer, model.momentum, tied)


def _gpt_embedding(model: Transformer) -> LayerWork:
    width, kept = model.width_bytes, model.index_bytes + model.mark_bytes
    return LayerWork(
        kind="embedding",
        parameters=(model.vocabulary + model.positions) * model.hidden,
        forward_flops=0,
        backward_flops=0,
        input_bytes=model.index_bytes,
        output_bytes=width,
        activation_bytes=kept,
        deferred_bytes=kept,
        working_bytes=2 * width if model.dropout else width,
        matrix_bytes=_table_bytes(model),
        beside_matrix_bytes=2 * width - model.mark_bytes if model.dropout else width,
    )


def _bert_embedding(model: Transformer, segments: int) -> LayerWork:
    width = model.width_bytes
    kept = 2 * model.index_bytes + width + model.statistic_bytes + model.mark_bytes
    return LayerWork(
        kind="embedding",
        parameters=(model.vocabulary + model.positions + segments + 2) * model.hidden,
        forward_flops=0,
        backward_flops=0,
        input_bytes=2 * model.index_bytes,
        output_bytes=width,
        activation_bytes=kept,
        deferred_bytes=kept,
        working_bytes=2 * width,
        matrix_bytes=_table_bytes(model),
        beside_matrix_bytes=width,
    )


def _table_bytes(model: Transformer) -> int:
    """Of the gradient of an embedding, by token or by position."""
    return max(model.vocabulary, model.positions + model.sequence_length) * model.hidden * model.of.number


def _gpt_head(model: Transformer) -> LayerWork:
    of, width, logits = model.of, model.width_bytes, model.logits
    flops = 2 * logits * model.hidden
    return LayerWork(
        kind="head",
        parameters=(model.vocabulary + 2) * model.hidden,
        forward_flops=flops,
        backward_flops=2 * flops,
        input_bytes=width,
        output_bytes=logits * of.number,
        # Inputs of the LayerNorm and of the matrix, the logarithms of all probabilities, and the targets.
        activation_bytes=2 * width + model.statistic_bytes + logits * of.sum + model.index_bytes,
        deferred_bytes=3 * width + model.statistic_bytes + logits * of.number,
        working_bytes=2 * logits * of.sum,
        matrix_bytes=model.vocabulary * model.hidden * of.number,
        beside_matrix_bytes=width + logits * (of.number - of.sum),
    )


def _bert_head(model: Transformer, found: int) -> LayerWork:
    """`found` are the tokens that are to be found."""
    of, width, logits, hidden, vocabulary = model.of, model.width_bytes, model.logits, model.hidden, model.vocabulary
    rows = found * vocabulary
    flops = 2 * hidden * (model.sequence_length * (hidden + vocabulary) + hidden + 2)
    kept = 4 * width + model.statistic_bytes + hidden * of.number
    return LayerWork(
        kind="head",
        parameters=2 * hidden * (hidden + 1) + 2 * hidden + (vocabulary + 2) * (hidden + 1),
        forward_flops=flops,
        backward_flops=2 * flops,
        input_bytes=width,
        output_bytes=(logits + 2) * of.number,
        activation_bytes=kept + _pretraining_bytes(model.sequence_length, found, vocabulary, of),
        deferred_bytes=5 * width + model.statistic_bytes + (2 * hidden + logits + 2) * of.number,
        working_bytes=max(2 * rows * of.sum, (logits + rows) * of.number - rows * of.sum),
        matrix_bytes=vocabulary * hidden * of.number,
        beside_matrix_bytes=width + logits * of.number - rows * of.sum,
    )


def _pretraining_bytes(tokens: int, found: int, vocabulary: int, of: Numbers) -> float:
    """What BERT's loss keeps: which tokens are to be found; logarithms of probabilities, targets and weights of these;
    and the first two of the next sentence."""
    return tokens + found * (vocabulary * of.sum + INDEX_BYTES + of.sum) + 2 * of.sum + INDEX_BYTES


def _block(model: Transformer, held: int) -> LayerWork:
    """A transformer block, its LayerNorms before or behind its halves.

    A backward begins with the gradients of its output and of the wide layer (1 + 4), and one of the residual stream,
    where dropout is. In the first half of a split one nothing is let go of until the gradient of what GELU takes is
    there too, and `held` gradients in all, in the size of the input. As many such tensors the whole backward is rid of
    when it comes to attention, whose scores may be larger.
    """
    width, marks, tokens, hidden = model.width_bytes, model.mark_bytes, model.sequence_length, model.hidden
    begun = width - marks if marks else 0
    attention = _attention(model, held)
    flops = 24 * tokens * hidden * hidden + 4 * tokens * tokens * hidden
    return LayerWork(
        kind="block",
        parameters=(12 * hidden + 13) * hidden,
        forward_flops=flops,
        backward_flops=2 * flops,
        input_bytes=width,
        output_bytes=width,
        activation_bytes=12 * width + 2 * model.statistic_bytes + 2 * marks + attention.kept_bytes,
        deferred_bytes=20 * width + 2 * model.statistic_bytes,
        working_bytes=max(5 * width + begun, attention.working_bytes),
        matrix_bytes=4 * hidden * hidden * model.of.number,
        beside_matrix_bytes=5 * width + begun,
        input_working_bytes=max(held * width + begun, attention.input_working_bytes),
    )


class _Attention(NamedTuple):
    """What attention keeps, beside its input and the weights of its matrices; and what a block has in addition to all
    that it keeps when the whole backward, or its first half, is at the scores."""

    kept_bytes: float
    working_bytes: float = 0
    input_working_bytes: float = 0


def _attention(model: Transformer, held: int) -> _Attention:
    """Queries, keys, values and what comes out are kept; then a sum for each row of scores, or the shares that they
    become, and with dropout those that are left and which they are. The gradients of both are there at once."""
    of, width, own = model.of, model.width_bytes, model.values * model.of.sum
    if of.fused:
        return _Attention(4 * width + model.sequence_length * model.heads * of.sum)
    numbers = model.heads * model.sequence_length**2
    scores = numbers * of.sum
    if not of.mark:
        return _Attention(width + 3 * own + scores, 2 * scores - held * width, 2 * scores + (held - 6) * width)
    beside = scores + 2 * own - 2 * model.mark_bytes
    which = numbers * (of.sum if of.mark > 1 else 1)
    return _Attention(width + 3 * own + 2 * scores + which, beside - held * width, beside + 5 * width)


def _of(table: dict[str, int], key: str, name: str) -> int:
    if name not in table:
        raise InputError(f"{key}={name!r} is unknown: {nearest(name, list(table))}")
    return table[name]
