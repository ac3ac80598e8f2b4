"""BERT to the digit: parameter counts, the formula, the initial weights, and a loss of one count."""

import math

import pytest
import torch
import torch.nn.functional as F

from chimera_mpi import data
from chimera_mpi.errors import InputError
from chimera_mpi.models import BERT, IGNORED, bert, make_layer, parameter_count, pretraining_loss

LARGE = {"hidden": 1024, "heads": 16}
TINY = {"layers": 3, "hidden": 24, "heads": 4, "vocabulary": 31, "positions": 12}


def build(config: BERT, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.ModuleList:
    model = bert(config)
    return torch.nn.ModuleList(make_layer(model, index, seed, dtype) for index in range(len(model.layers)))


def run(layers, *tensors):
    for layer in layers:
        output = layer(*tensors)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (BERT(), 110_106_428),  # BertForPreTraining of bert-base-uncased
        (BERT(layers=24, **LARGE), 336_226_108),  # and of bert-large-uncased
        (BERT(layers=48, **LARGE, tied=False), 669_790_012),  # Bert-48: Chimera (Li and Hoefler 2021), Section 4
    ],
)
def test_parameter_counts(config, parameters):
    assert parameter_count(bert(config)) == parameters


def reference(w, config: BERT, ids, segments):
    """Both logits of one sample without padding by BERT's formulas, head by head, with the softmax written out."""

    def norm(x, name):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-12).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return torch.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def attend(query, key, value):
        e = (torch.einsum("ti,si->ts", query, key) / math.sqrt(query.shape[1])).exp()
        return (e / e.sum(1, keepdim=True)) @ value

    x = w["0.tokens.weight"][ids] + w["0.positions.weight"][: len(ids)] + w["0.segments.weight"][segments]
    x = norm(x, "0.norm")
    for layer in range(1, config.layers + 1):
        query, key, value = linear(x, f"{layer}.attention.qkv").split(config.hidden, 1)
        size = config.hidden // config.heads
        heads = [slice(head * size, (head + 1) * size) for head in range(config.heads)]
        seen = torch.cat([attend(query[:, head], key[:, head], value[:, head]) for head in heads], dim=1)
        x = norm(x + linear(seen, f"{layer}.attention.output"), f"{layer}.attention_norm")
        x = norm(x + linear(gelu(linear(x, f"{layer}.mlp.input")), f"{layer}.mlp.output"), f"{layer}.mlp_norm")
    last = config.layers + 1
    words = linear(norm(gelu(linear(x, f"{last}.transform")), f"{last}.norm"), f"{last}.decoder")
    return words, linear(torch.tanh(linear(x[0], f"{last}.pooler")), f"{last}.follows")


def shaken(config: BERT) -> torch.nn.ModuleList:
    """Weights far from the initial ones, which hide mistakes."""
    layers = build(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layers


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (2, 7), (4, 12)])
def test_logits_follow_the_formula(heads, tokens, padded):
    """Also behind a padded end, which has no effect on what comes before."""
    config = BERT(**{**TINY, "heads": heads})
    layers = shaken(config)
    lengths = [max(1, tokens - 2 * sample * padded) for sample in range(3)]
    ids, segments = torch.randint(31, (3, tokens)), torch.randint(2, (3, tokens))
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None],) if padded else ()
    with torch.no_grad():
        words, follows = run(layers, ids, segments, *mask)
        for sample, length in enumerate(lengths):
            wanted = reference(layers.state_dict(), config, ids[sample, :length], segments[sample, :length])
            torch.testing.assert_close(words[sample, :length], wanted[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(follows[sample], wanted[1], rtol=0, atol=1e-10)


def test_a_mask_travels_and_without_one_nothing_else_does():
    layers = build(BERT(**TINY))
    ids = torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert isinstance(run(layers[:2], ids, ids)[0], torch.Tensor) and len(run(layers[:2], ids, ids)) == 1
    _, travelled = run(layers[:-1], ids, ids, mask)
    assert travelled.dtype == torch.bool and torch.equal(travelled, mask)


def test_weights_start_small_and_biases_from_zero():
    config = BERT(layers=2, hidden=256, heads=4, vocabulary=1000, positions=500, segments=100, tied=False)
    for name, parameter in build(config, dtype=torch.float32).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_is_tied_to_the_tokens_or_not(tied):
    layers = build(BERT(**TINY, tied=tied))
    assert torch.equal(layers[0].tokens.weight, layers[-1].decoder.weight) == tied


def test_each_dropout_is_there_and_stops_in_eval():
    layers = build(BERT(**TINY, dropout=0.5))
    ids = torch.randint(31, (2, 8))
    dropouts = [module for module in layers.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) == 1 + 2 * TINY["layers"]
    for alone in dropouts:
        for dropout in dropouts:
            dropout.p = 0.5 if dropout is alone else 0.0
        assert not torch.equal(run(layers, ids, ids % 2)[0], run(layers, ids, ids % 2)[0])
    layers.eval()
    assert torch.equal(run(layers, ids, ids % 2)[0], run(layers, ids, ids % 2)[0])


# ---- the loss ----------------------------------------------------------------------------------------------------


def outputs_and_targets(samples=6, tokens=10, masked=(3,)):
    torch.manual_seed(0)
    words = torch.full((samples, tokens), IGNORED)
    for sample in range(samples):
        places = torch.randperm(tokens)[: masked[sample % len(masked)]]
        words[sample, places] = torch.randint(7, places.shape)
    logits = torch.randn(samples, tokens, 7, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(samples, 2, dtype=torch.float64, requires_grad=True), (words, torch.arange(samples) % 2)


def test_with_as_many_masked_tokens_in_each_sample_it_is_berts_loss():
    """The mean over all masked tokens plus the mean over all samples: two counts in BERT, one here."""
    logits, next_logits, (words, follows) = outputs_and_targets()
    loss, count = pretraining_loss(logits, next_logits, (words, follows))
    wanted = F.cross_entropy(logits.flatten(0, 1), words.flatten()) + F.cross_entropy(next_logits, follows)
    assert (count.item(), count.dtype, count.shape) == (6, torch.float64, loss.shape)
    torch.testing.assert_close(loss / count, wanted, rtol=1e-14, atol=0)
    mine, theirs = (torch.autograd.grad(total, [logits, next_logits]) for total in (loss / count, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("masked", [(3,), (1, 5, 0)])
def test_the_losses_of_parts_add_up_however_uneven(masked):
    logits, next_logits, (words, follows) = outputs_and_targets(masked=masked)
    whole, count = pretraining_loss(logits, next_logits, (words, follows))
    parts = [
        pretraining_loss(logits[part], next_logits[part], (words[part], follows[part]))
        for part in (slice(0, 1), slice(1, 6))
    ]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-14)
    assert [part_count.item() for _, part_count in parts] == [1, 5] and count.item() == 6


def test_nothing_to_find_is_zero_with_zero_gradient():
    logits, next_logits, (words, follows) = outputs_and_targets(masked=(0,))
    loss, count = pretraining_loss(logits, next_logits, (words, torch.full_like(follows, IGNORED)))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 6)
    assert not logits.grad.any() and not next_logits.grad.any()


def test_half_precision_logits_are_summed_in_float32():
    logits, next_logits, targets = outputs_and_targets()
    loss, count = pretraining_loss(logits.bfloat16(), next_logits.bfloat16(), targets)
    assert loss.dtype == count.dtype == torch.float32
    wanted, _ = pretraining_loss(logits.bfloat16().double(), next_logits.bfloat16().double(), targets)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_an_untrained_model_knows_nothing():
    config = BERT(layers=4, hidden=64, heads=4, vocabulary=261, positions=32)
    ids = torch.randint(261, (8, 32))
    loss, count = bert(config).loss(*run(build(config).eval(), ids, ids % 2), (ids, torch.arange(8) % 2))
    assert (loss / count).item() == pytest.approx(math.log(261) + math.log(2), abs=0.15)


def test_data_and_models_ignore_the_same_target():
    assert data.IGNORED == IGNORED


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 100, "heads": 16}, "hidden=100 .* heads=16: try hidden=96 or hidden=112"),
        ({"layers": 0}, "layers=0 is below 1: a BERT needs"),
        ({"segments": 0}, "segments=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        BERT(**wrong)


def test_a_sample_longer_than_the_positions_is_refused():
    ids = torch.zeros(1, 13, dtype=torch.int64)
    with pytest.raises(InputError, match=r"13 tokens.*positions=12"):
        run(build(BERT(**TINY)), ids, ids)
