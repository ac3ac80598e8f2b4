"""The closed forms of what layers do and hold, against torch: its counter of FLOPs, and what its autograd saves."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from chimera_mpi.config import checked, load, presets
from chimera_mpi.data import Corpus, MaskedBatches
from chimera_mpi.errors import InputError
from chimera_mpi.models import BERT, GPT, bert, gpt, make_layer, parameter_count
from chimera_mpi.predict.work import Transformer, bert_work, gpt_work
from chimera_mpi.runtime.gradients import accumulated_in
from chimera_mpi.runtime.optimizer import OPTIMIZERS, Recipe
from chimera_mpi.runtime.sizing import layers_of
from chimera_mpi.runtime.tensors import PRECISIONS, Spec, token_specs
from chimera_mpi.tasks import task_of
from chimera_mpi.work import work_of

SHAPES = [  # layers, hidden, heads, vocabulary, positions, tokens
    (1, 8, 2, 11, 8, 8),
    (2, 24, 3, 50, 20, 13),
]
KINDS = ("gpt", "bert")


def shape_of(shape, tied=False, dropout=0.0):
    layers, hidden, heads, vocabulary, positions, tokens = shape
    keys = {
        "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "positions": positions,
        "tied": tied, "dropout": dropout,
    }  # fmt: skip
    return keys, tokens


SHAPE = {**shape_of(SHAPES[0])[0], "sequence_length": SHAPES[0][-1]}


def model_and_work(kind, shape, precision="fp32", tied=False, dropout=0.0):
    keys, tokens = shape_of(shape, tied, dropout)
    model = gpt(GPT(**keys)) if kind == "gpt" else bert(BERT(**keys))
    closed = gpt_work if kind == "gpt" else bert_work
    return model, closed(Transformer(**keys, sequence_length=tokens, precision=precision))


def entering(kind, tokens, samples):
    return token_specs(samples, tokens, 1 if kind == "gpt" else 2)


def targets_of(kind, vocabulary, tokens, samples):
    """GPT's, or BERT's with as many tokens masked in each sample as its data has."""
    words = torch.randint(vocabulary, (samples, tokens))
    if kind == "gpt":
        return words
    masked = max(1, round(0.15 * tokens))
    words[:, masked:] = -100
    return words, torch.zeros(samples, dtype=torch.int64)


# ---- FLOPs


def counted_flops(model, index, specs, wants_gradient):
    layer = make_layer(model, index, 0, device="meta")
    inputs = [torch.zeros(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    inputs = [x.requires_grad_(x.is_floating_point() and wants_gradient) for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forth:
            leaving = layer(*inputs)
        leaving = leaving if isinstance(leaving, tuple) else (leaving,)
        with FlopCounterMode(display=False) as back:
            torch.autograd.backward(leaving, [torch.ones_like(t) for t in leaving])
    return forth.get_total_flops(), back.get_total_flops()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_torch_counts(kind, shape, samples):
    model, work = model_and_work(kind, shape)
    *_, tokens = shape
    hidden = shape[1]
    for index, layer in enumerate(work.layers):
        specs = entering(kind, tokens, samples) if index == 0 else (Spec((samples, tokens, hidden), torch.float32),)
        forth, back = counted_flops(model, index, specs, index > 0)
        assert (forth, back) == (samples * layer.forward_flops, samples * layer.backward_flops)


# ---- what autograd saves


def saved_bytes(kind, shape, model, index, precision, samples):
    """Of the storages that a layer's graph keeps, and of its input; without its weights'."""
    hidden, vocabulary, tokens = shape[1], shape[3], shape[5]
    layer = make_layer(model, index, 0, PRECISIONS[precision])
    if index:
        inputs = (torch.ones(samples, tokens, hidden, dtype=PRECISIONS[precision]).requires_grad_(),)
    else:
        inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in entering(kind, tokens, samples))
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in inputs}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaving = layer(*inputs)
        if index + 1 == len(model.layers):
            leaving = leaving if isinstance(leaving, tuple) else (leaving,)
            leaving = model.loss(*leaving, targets_of(kind, vocabulary, tokens, samples))
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_saves(kind, shape, precision, dropout):
    """To the byte of each sample, from two on; beside them a micro-batch has the numbers of its positions."""
    model, work = model_and_work(kind, shape, precision, dropout=dropout)
    for index, layer in enumerate(work.layers):
        few, many = (saved_bytes(kind, shape, model, index, precision, samples) for samples in (2, 5))
        assert (many - few) / 3 == layer.activation_bytes, layer.kind
        assert 0 <= few - 2 * layer.activation_bytes <= 8 * shape[5] + 16, layer.kind


# ---- the same of any model, by fake tensors


class Doubled(torch.nn.Module):
    """Keeps its own output, as ReLU does, which is the next layer's input."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.wide, self.scale = torch.nn.Linear(inputs, outputs), torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.relu(self.wide(x) * self.scale)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPES[1], (1, 32, 4, 19, 70, 70)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_fake_tensors_find_what_the_closed_forms_say(kind, shape, precision, dropout):
    """Two ways to the same numbers. BERT's loss asks which tokens are masked, which fake tensors do not know."""
    model, work = model_and_work(kind, shape, precision, dropout=dropout)
    *_, tokens = shape
    specs = partial(entering, kind, tokens)
    found = layers_of(model, specs, partial(token_specs, tokens=tokens), 4, PRECISIONS[precision])
    assert len(found) == len(work.layers)
    for by_pass, layer in list(zip(found, work.layers, strict=True))[: None if kind == "gpt" else -1]:
        for name in ("parameters", "forward_flops", "backward_flops", "input_bytes", "output_bytes"):
            assert getattr(by_pass, name) == getattr(layer, name), (layer.kind, name)
        assert by_pass.activation_bytes == layer.activation_bytes, layer.kind
        if layer is not work.layers[0]:  # the first has no half that gives gradients to its input
            assert by_pass.deferred_bytes == layer.deferred_bytes, layer.kind
            own = layer.deferred_bytes - layer.activation_bytes + layer.input_bytes  # at the end of the half
            own = max(own, layer.working_bytes if layer.input_working_bytes is None else layer.input_working_bytes)
            assert by_pass.input_working_bytes == pytest.approx(own, rel=0.05), layer.kind
        assert by_pass.backward_peak_bytes(4) == pytest.approx(layer.backward_peak_bytes(4), rel=0.05), layer.kind
    assert [layer.kind for layer in found[1:-1]] == ["Block"] * (len(found) - 2)


def uneven():
    """Layers of a user, whose sizes differ."""
    sizes = (6, 40, 8, 8, 8, 3)
    return [torch.nn.Embedding(9, 6), *(Doubled(a, b) for a, b in pairwise(sizes))]


def test_a_users_layers_are_told_apart_by_what_they_do():
    config = checked({"model": f"{__name__}:uneven", "sequence_length": 5, "optimizer": "sgd", "micro_batch_size": 2})
    work = work_of(config)
    assert [layer.kind for layer in work.layers] == [
        "Embedding", "Doubled", "Doubled 2", "Doubled 3", "Doubled 3", "Doubled 4",
    ]  # fmt: skip
    first, second, third = work.layers[1:4]
    assert first.parameters == 6 * 40 + 40 + 1 and second.input_bytes == 4 * 5 * 40 == first.output_bytes
    assert first.forward_flops == 2 * 5 * 6 * 40 and first.backward_flops == 2 * first.forward_flops
    # Input and what the weight made of it; the output counts where it enters.
    assert third.activation_bytes == 4 * 5 * (8 + 8)
    assert (work.state_bytes, work.parameters) == (4, sum(layer.parameters for layer in work.layers))


# ---- what is the same elsewhere


def test_the_paper_s_models_have_their_parameters_and_activations():
    """Bert-48: 669,790,012 parameters; a layer of it was measured to keep 11 MiB of a sample (Chimera, Section 4)."""
    work = work_of(load("bert-48"), "cuda", fused=False)
    assert work.parameters == 669_790_012
    assert work.layers[1].activation_bytes == pytest.approx(11 * 2**20, rel=0.05)
    assert work_of(load("gpt2-paper")).parameters == 1_389_327_360


@pytest.mark.parametrize("source", presets())
def test_parameters_are_those_of_the_model(source):
    config = load(source)
    assert work_of(config).parameters == parameter_count(task_of(config).model)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_of_a_parameter_are_those_of_its_tensors(precision):
    dtype = PRECISIONS[precision]
    work = gpt_work(Transformer(**SHAPE, precision=precision))
    assert (work.parameter_bytes, work.gradient_bytes) == (dtype.itemsize, accumulated_in(dtype).itemsize)
    assert work.master_bytes == (work.gradient_bytes if accumulated_in(dtype) != dtype else 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_s_state_is_what_it_keeps(optimizer):
    """But for Adafactor's rows and columns."""
    weight = torch.nn.Parameter(torch.ones(300, 400))
    weight.grad = torch.ones(300, 400)
    made = Recipe(optimizer, momentum=0.9).build([weight])
    made.step()
    kept = sum(value.nbytes for value in made.state[weight].values() if isinstance(value, torch.Tensor))
    work = gpt_work(Transformer(**SHAPE, optimizer=optimizer))
    assert kept == pytest.approx(work.state_bytes * weight.numel(), abs=8 * 700)
    assert gpt_work(Transformer(**SHAPE, optimizer="sgd", momentum=0)).state_bytes == 0


@pytest.mark.parametrize("tokens", [8, 33, 128, 512])
def test_as_many_tokens_are_masked_as_in_bert_s_data(tokens):
    corpus = Corpus(Path("zeros"), "train", tokens, 9, np.zeros(9 * tokens, np.int64), 0.0, "")
    data = MaskedBatches(corpus, (1,))
    model = Transformer(**{**SHAPE, "positions": tokens, "sequence_length": tokens})
    assert bert_work(model) == bert_work(model, masked=data.masked) != bert_work(model, masked=data.masked + 1)


@pytest.mark.parametrize(("key", "value"), [("precision", "fp8"), ("optimizer", "adam")])
def test_an_unknown_name_is_refused_in_a_line(key, value):
    with pytest.raises(InputError, match=f"{key}='{value}' is unknown: "):
        gpt_work(Transformer(**SHAPE, **{key: value}))
