"""Layers by rule: the same weights for (seed, layer), whoever builds them, when and where."""

import hashlib

import pytest
import torch
from torch import nn

from chimera_mpi.models import GPT, IGNORED, Model, cross_entropy, gpt, keyed_seed, make_layer, parameter_count

TINY = GPT(layers=3, hidden=16, heads=2, vocabulary=29, positions=8, tied=False)
UNTIED = gpt(TINY)
TIED = gpt(GPT(layers=3, hidden=16, heads=2, vocabulary=29, positions=8, tied=True))


def fingerprint(layer: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in layer.parameters())).hexdigest()


def fingerprints(model: Model, seed: int, order) -> dict[int, str]:
    return {index: fingerprint(make_layer(model, index, seed)) for index in order}


@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
def test_weights_do_not_depend_on_what_was_built_before(model):
    forwards = fingerprints(model, 7, range(5))
    torch.manual_seed(99)
    torch.rand(3)
    assert fingerprints(model, 7, reversed(range(5))) == forwards
    assert fingerprints(model, 7, [3]) == {3: forwards[3]}
    assert fingerprint(make_layer(model, -1, 7)) == forwards[4]


def test_no_two_layers_and_no_two_seeds_are_equal():
    everything = [mark for seed in range(4) for mark in fingerprints(UNTIED, seed, range(5)).values()]
    assert len(set(everything)) == len(everything)


def test_weights_stay_what_they_were_last_year():
    """Checkpoints do not need it, but a published run does."""
    weight = make_layer(UNTIED, 1, 0).get_parameter("attention.qkv.weight")
    assert weight[0, :3].tolist() == pytest.approx([0.02908240, -0.00345304, -0.00751081], rel=1e-5)
    assert keyed_seed(1, 2, 3) == 8149998584550362645


def test_the_callers_torch_is_left_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_layer(TIED, 4, 0)
    make_layer(TIED, 1, 0, device="meta")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_the_callers_defaults_do_not_change_the_weights():
    expected = fingerprint(make_layer(UNTIED, 1, 0))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert fingerprint(make_layer(UNTIED, 1, 0)) == expected
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_that_cannot_be_built_leaves_torch_as_it_was():
    def broken() -> nn.Module:
        torch.rand(1)
        raise RuntimeError("broken")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken"):
        make_layer(Model((broken,), cross_entropy), 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", range(5))
def test_another_dtype_is_the_same_numbers_cast(dtype, index):
    wanted = make_layer(TIED, index, 3).state_dict()
    found = make_layer(TIED, index, 3, dtype=dtype).state_dict()
    assert all(torch.equal(found[name], wanted[name].to(dtype)) for name in wanted)


@pytest.mark.parametrize(
    ("dtype", "complex_dtype"),
    [
        (torch.float32, torch.complex64),
        (torch.float64, torch.complex128),
        (torch.bfloat16, torch.complex64),
        (torch.float16, torch.complex64),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_complex_buffers_stay_complex(dtype, complex_dtype, device):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", torch.tensor([1 + 2j]))

    layer = make_layer(Model((Rotation,), cross_entropy), 0, 0, dtype, device)
    assert layer.angles.dtype is complex_dtype
    assert device == "meta" or layer.angles.tolist() == [1 + 2j]


def test_a_tied_parameter_starts_as_its_owner_in_memory_of_its_own():
    owner = make_layer(TIED, 0, 1).get_parameter("tokens.weight")
    copy = make_layer(TIED, 4, 1).get_parameter("output.weight")
    assert torch.equal(owner, copy)
    assert owner.data_ptr() != copy.data_ptr()
    assert not torch.equal(make_layer(UNTIED, 0, 1).tokens.weight, make_layer(UNTIED, 4, 1).output.weight)


def test_parameters_tied_within_one_layer():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    model = Model((Pair,), cross_entropy, tied=(((0, "a.weight"), (0, "b.weight")),))
    pair = make_layer(model, 0, 0)
    assert torch.equal(pair.a.weight, pair.b.weight)
    assert parameter_count(model) == 4 + 2 + 2


def test_meta_layers_hold_nothing():
    layer = make_layer(gpt(GPT(hidden=100_000, heads=1)), 1, 0, dtype=torch.bfloat16, device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


def test_parameters_are_counted_once():
    count = sum(p.numel() for index in range(5) for p in make_layer(TIED, index, 0).parameters())
    assert parameter_count(UNTIED) == count
    assert parameter_count(TIED) == count - 29 * 16


@pytest.mark.parametrize(
    ("layers", "tied"),
    [(0, ()), (1, (((0, "weight"), (1, "weight")),)), (2, (((0, "a"), (1, "a")), ((1, "a"), (0, "b"))))],
)
def test_a_model_is_checked_at_birth(layers, tied):
    with pytest.raises(ValueError):
        Model((nn.Identity,) * layers, cross_entropy, tied)


def test_keyed_seeds_are_distinct_and_fit_63_bits():
    seeds = [keyed_seed(*parts) for a in range(30) for b in range(30) for parts in [(a, b), (a, b, 0)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert keyed_seed(1, 23) != keyed_seed(12, 3)
    assert max(seeds) > 2**62


def test_an_index_past_the_end_is_refused():
    with pytest.raises(IndexError):
        make_layer(UNTIED, 5, 0)


def test_the_loss_is_a_sum_with_its_count():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (2, 5))
    targets[0, :3] = IGNORED
    loss, count = cross_entropy(logits, targets)
    log_p = logits.log_softmax(-1)
    by_hand = -sum(log_p[b, t, targets[b, t]] for b in range(2) for t in range(5) if targets[b, t] != IGNORED)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-14)
    assert (count.item(), count.dtype, count.shape) == (7, torch.float64, loss.shape)


def test_the_losses_of_parts_add_up_however_uneven():
    torch.manual_seed(0)
    logits = torch.randn(4, 4, 7, dtype=torch.float64)
    targets = torch.randint(7, (4, 4))
    targets[1:].view(-1)[1:] = IGNORED
    whole, count = cross_entropy(logits, targets)
    parts = [cross_entropy(logits[part], targets[part]) for part in (slice(0, 1), slice(1, 4))]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-14)
    assert [part_count.item() for _, part_count in parts] == [4, 1]
    assert count.item() == 5


def test_nothing_to_predict_is_zero_with_zero_gradient():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss, count = cross_entropy(logits, torch.full((1, 3), IGNORED))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert logits.grad is not None and not logits.grad.any()


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 4096, 257, dtype=torch.bfloat16)
    loss, count = cross_entropy(logits, torch.zeros(1, 4096, dtype=torch.int64))
    assert loss.dtype == count.dtype == torch.float32
    assert loss.item() == pytest.approx(4096 * torch.tensor(257.0).log().item(), rel=1e-6)
