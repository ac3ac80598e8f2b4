"""GPT-2 to the digit: parameter counts, the formula, the initial weights."""

import math

import pytest
import torch

from chimera_mpi.errors import InputError
from chimera_mpi.models import GPT, gpt, make_layer, parameter_count

PAPER = {"hidden": 1280, "heads": 20, "vocabulary": 50257, "positions": 1024, "tied": False}


def build(config: GPT, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    model = gpt(config)
    return torch.nn.Sequential(*(make_layer(model, index, seed, dtype) for index in range(len(model.layers))))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT(), 124_439_808),  # GPT-2 small, Radford et al. 2019
        (GPT(layers=24, hidden=1024, heads=16), 354_823_168),  # medium
        (GPT(layers=36, hidden=1280, heads=20), 774_030_080),  # large
        (GPT(layers=48, hidden=1600, heads=25), 1_557_611_200),  # XL
        (GPT(layers=64, **PAPER), 1_389_327_360),  # Chimera (Li and Hoefler 2021), Section 4
        (GPT(layers=32, **PAPER), 759_649_280),
    ],
)
def test_parameter_counts(config, parameters):
    assert parameter_count(gpt(config)) == parameters


def reference(weights: dict[str, torch.Tensor], config: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sample by GPT-2's formulas, head by head, with the softmax written out."""

    def norm(x, name):
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return torch.einsum("ti,oi->to", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    def attend(query, key, value):
        scores = torch.einsum("ti,si->ts", query, key) / math.sqrt(query.shape[1])
        future = torch.arange(len(scores))[None, :] > torch.arange(len(scores))[:, None]
        e = scores.masked_fill(future, -torch.inf).exp()
        return (e / e.sum(1, keepdim=True)) @ value

    x = weights["0.tokens.weight"][ids] + weights["0.positions.weight"][: len(ids)]
    for layer in range(1, config.layers + 1):
        query, key, value = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv").split(config.hidden, 1)
        size = config.hidden // config.heads
        heads = [slice(head * size, (head + 1) * size) for head in range(config.heads)]
        seen = torch.cat([attend(query[:, head], key[:, head], value[:, head]) for head in heads], dim=1)
        x = x + linear(seen, f"{layer}.attention.output")
        u = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.input")
        wide = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + linear(wide, f"{layer}.mlp.output")
    last = config.layers + 1
    return norm(x, f"{last}.norm") @ weights[f"{last}.output.weight"].T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (2, 7), (4, 12)])
def test_logits_follow_the_formula(tied, heads, tokens):
    config = GPT(layers=3, hidden=24, heads=heads, vocabulary=31, positions=12, tied=tied)
    model = build(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the initial ones, which hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        ids = torch.randint(31, (3, tokens))
        logits = model(ids)
        for sample, found in zip(ids, logits, strict=True):
            torch.testing.assert_close(found, reference(model.state_dict(), config, sample), rtol=0, atol=1e-10)


def test_no_token_sees_a_later_one():
    model = build(GPT(layers=2, hidden=16, heads=2, vocabulary=11, positions=8)).eval()
    ids = torch.randint(11, (1, 8))
    changed = ids.clone()
    changed[0, 5:] = (ids[0, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


def test_weights_start_as_gpt2_says():
    config = GPT(layers=8, hidden=256, heads=4, vocabulary=1000, positions=500, tied=False)
    for name, parameter in build(config, dtype=torch.float32).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.output.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(parameter.mean().item()) < 0.02 * std, name


def test_an_untrained_model_knows_nothing():
    config = GPT(layers=4, hidden=64, heads=4, vocabulary=257, positions=32, tied=True, dropout=0)
    model = gpt(config)
    ids = torch.randint(257, (8, 33))
    loss, count = model.loss(build(config)(ids[:, :-1]), ids[:, 1:])
    assert count == 8 * 32
    assert (loss / count).item() == pytest.approx(math.log(257), abs=0.1)


def test_dropout_follows_torchs_generator_and_stops_in_eval():
    model = build(GPT(layers=2, hidden=16, heads=2, vocabulary=11, positions=8, dropout=0.5))
    ids = torch.randint(11, (2, 8))

    def drawn(seed):
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    model.eval()
    assert torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("part", ["embedding", "attention", "residual"])
def test_each_dropout_is_there(part):
    """With all but one kind off, the output still depends on the draw."""
    model = build(GPT(layers=1, hidden=16, heads=2, vocabulary=11, positions=8, dropout=0.5))
    embedding, block, _ = model
    dropouts = {
        "embedding": embedding.dropout,
        "attention": block.attention.dropout,
        "residual": block.mlp.dropout,
    }
    for name, dropout in dropouts.items():
        dropout.p = 0.5 if name == part else 0.0
    ids = torch.randint(11, (2, 8))
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 100, "heads": 16}, "hidden=100 .* heads=16: try hidden=96 or hidden=112"),
        ({"hidden": 3, "heads": 16}, "try hidden=16"),
        ({"layers": 0}, "layers=0"),
        ({"heads": 0}, "heads=0"),
        ({"vocabulary": -1}, "vocabulary=-1"),
        ({"positions": 0}, "positions=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"dropout": float("nan")}, "dropout=nan"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        GPT(**wrong)


def test_a_sample_longer_than_the_positions_is_refused():
    layer = make_layer(gpt(GPT(layers=1, hidden=8, heads=1, vocabulary=5, positions=4)), 0, 0)
    with pytest.raises(InputError, match=r"5 tokens.*positions=4"):
        layer(torch.zeros(1, 5, dtype=torch.int64))
