"""Any list of modules is a model; what is none is refused in one line."""

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from chimera_mpi.errors import InputError
from chimera_mpi.models import GPT, Model, as_model, cross_entropy, gpt, make_layer, parameter_count, user_model

MODULE = """
import random
import numpy as np
import torch
from torch import nn
from chimera_mpi.models import GPT, gpt

NUMBER = 3
LAYERS = nn.Sequential(nn.Linear(2, 2))

def sequential():
    return nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))

def everything_random():
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[random.random(), np.random.rand(), torch.rand(1).item()]]))
    return [layer]

def ours():
    return gpt(GPT(layers=1, hidden=8, heads=2, vocabulary=11, positions=4))

def none():
    pass

def empty():
    return []

def of_wrong_type():
    return [nn.Tanh(), "tanh"]

def failing():
    return [nn.Linear(2, 2), nn.Linear("two", 2)]

def asking(size):
    return [nn.Linear(size, size)]

class Nested:
    @staticmethod
    def build():
        return [nn.Tanh()]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder, which is not on the path."""
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "model.py").write_text(MODULE)
    (tmp_path / "their_package" / "broken.py").write_text("import torch\nx = (\n")
    (tmp_path / "their_package" / "poor.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "their_package.model"
    for name in [name for name in sys.modules if name.startswith("their_package")]:
        del sys.modules[name]


def layers_of(model: Model, **options) -> list[nn.Module]:
    return [make_layer(model, index, 0, **options) for index in range(len(model.layers))]


def run(layers, *tensors):
    for layer in layers:
        output = layer(*tensors)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


# ---- what may be built -------------------------------------------------------------------------------------------


def test_a_sequential_of_a_module_that_is_named(module):
    model = user_model(f"{module}:sequential", seed=4)
    assert [type(layer) for layer in layers_of(model)] == [nn.Embedding, nn.Tanh, nn.Linear]
    assert model.loss is cross_entropy and model.tied == ()
    assert parameter_count(model) == 11 * 8 + 8 * 11 + 11
    ids = torch.randint(11, (2, 5))
    loss, count = model.loss(*run(layers_of(model), ids), ids)
    assert count == 10 and loss > 0


def test_weights_follow_from_the_seed_whatever_they_are_drawn_from(module):
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    weights = [make_layer(user_model(f"{module}:everything_random", seed), 0, seed=9).weight for seed in (5, 5, 6)]
    assert torch.equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).all()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and (np.random.get_state()[1] == before[2]).all()


def test_a_model_is_taken_as_it_is(module):
    model = user_model(f"{module}:ours")
    wanted = gpt(GPT(layers=1, hidden=8, heads=2, vocabulary=11, positions=4))
    assert model.tied == wanted.tied and len(model.layers) == 3


def test_a_function_inside_a_class(module):
    assert len(user_model(f"{module}:Nested.build").layers) == 1


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList, lambda layers: nn.Sequential(*layers)])
@pytest.mark.parametrize("with_loss", [False, True])
def test_each_way_to_give_layers(kind, with_loss):
    def loss(output, targets):
        return output.sum(), len(targets)

    layers = kind([nn.Linear(2, 3), nn.ReLU()])
    model = as_model((layers, loss) if with_loss else layers)
    assert [type(layer) for layer in layers_of(model)] == [nn.Linear, nn.ReLU]
    assert (model.loss is cross_entropy) != with_loss


@pytest.mark.parametrize("first", [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])
def test_two_modules_are_two_layers(first):
    assert len(as_model((first, nn.Linear(2, 2))).layers) == 2


# ---- the layers are copies ---------------------------------------------------------------------------------------


def partly_frozen() -> nn.Sequential:
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    return nn.Sequential(frozen, nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False), nn.Tanh())


def test_copies_are_equal_and_apart_and_frozen_ones_stay_frozen():
    built = partly_frozen()
    model = as_model(built)
    first, second = layers_of(model), layers_of(model)
    for original, one, other in zip(built, first, second, strict=True):
        for name, wanted in original.state_dict(keep_vars=True).items():
            copies = [layer.state_dict(keep_vars=True)[name] for layer in (one, other)]
            assert all(torch.equal(copy, wanted) and copy.requires_grad == wanted.requires_grad for copy in copies)
            assert len({wanted.data_ptr(), *(copy.data_ptr() for copy in copies)}) == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_and_device(device):
    for layer in layers_of(as_model(partly_frozen()), dtype=torch.float64, device=device):
        for tensor in [*layer.parameters(), *layer.buffers()]:
            assert tensor.device.type == device
            assert tensor.dtype == (torch.int64 if tensor.dim() == 0 else torch.float64)
    frozen = [
        not p.requires_grad for layer in layers_of(as_model(partly_frozen()), device=device) for p in layer.parameters()
    ]
    assert frozen == [True, False, False, False, True, True]


def test_meta_copies_take_no_memory():
    with torch.device("meta"):
        built = nn.Sequential(nn.Linear(10**6, 10**6))
    assert make_layer(as_model(built), 0, 0, device="meta").weight.shape == (10**6, 10**6)


def test_a_shared_parameter_is_tied():
    embedding, between, head = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    model = as_model([embedding, between, between, head])
    assert model.tied == (
        ((0, "weight"), (3, "weight")),
        ((1, "weight"), (2, "weight")),
        ((1, "bias"), (2, "bias")),
    )
    assert parameter_count(model) == 21 + 12
    first, *_, last = layers_of(model)
    assert torch.equal(first.weight, last.weight)
    assert as_model([nn.Tanh()] * 3).tied == ()


class Carry(nn.Module):
    """Hands ids and a mask on beside what it makes of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)

    def forward(self, ids, mask):
        return self.embedding(ids), ids, mask


class Use(nn.Module):
    """Has no parameters."""

    def forward(self, x, ids, mask):
        return x * mask[..., None], ids


class CarriedLoss:
    """An object to call, with two outputs and a tuple of targets."""

    def __call__(self, x, ids, targets):
        wanted, weights = targets
        return (weights * (x.sum(-1) - wanted)).sum() + ids.sum() * 0, (weights > 0).sum()


def test_tuples_of_mixed_types_and_a_loss_of_ones_own():
    model = as_model(([Carry(), Use()], CarriedLoss()))
    ids, mask = torch.randint(11, (2, 5)), torch.rand(2, 5) < 0.5
    layers = layers_of(model, dtype=torch.float64)
    outputs = run(layers, ids, mask)
    assert [output.dtype for output in outputs] == [torch.float64, torch.int64]
    loss, count = model.loss(*outputs, (torch.ones(2, 5), torch.ones(2, 5)))
    assert (count.item(), count.dtype) == (10, torch.float64)
    loss.backward()
    assert layers[0].embedding.weight.grad.any()


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), torch.tensor(3), torch.tensor([3.0])])
def test_a_count_may_be_any_number(count):
    _, found = as_model(([nn.Tanh()], lambda output, targets: (output.sum(), count))).loss(torch.ones(2), None)
    assert (found.item(), found.dtype, found.shape) == (3, torch.float32, ())


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("their_package.model", "not of the form package.module:build"),
        (":build", "not of the form"),
        ("their_package.model:", "not of the form"),
        ("no_such_package.model:build", "no module 'no_such_package'"),
        ("their_package.nothing:build", r"no module 'their_package\.nothing'"),
        ("their_package.model:nothing", r"their_package\.model has no 'nothing'"),
        ("their_package.model:NUMBER", "is a int, not a function"),
        ("their_package.model:LAYERS", "is a Sequential, not a function"),
        ("their_package.model:none", "built a NoneType: return a list"),
        ("their_package.model:empty", "built no layers"),
        ("their_package.model:of_wrong_type", "layer 1 is a str"),
        ("their_package.model:failing", r"failing\(\) raised TypeError"),
        ("their_package.model:asking", r"asking\(\) raised TypeError: .*'size'"),
        ("their_package.broken:build", r"importing their_package\.broken raised SyntaxError"),
        ("their_package.poor:build", r"raised ModuleNotFoundError: .*no_such_library.*poor\.py, line 1"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(module, path, message):
    with pytest.raises(InputError, match=message) as refused:
        user_model(path)
    assert "\n" not in str(refused.value) and f"model={path}" in str(refused.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss gives no count"),
        (CarriedLoss, "an object to call, not CarriedLoss"),
        (3, "not int"),
    ],
)
@pytest.mark.parametrize("layers", [[nn.Tanh()], nn.Sequential(nn.Tanh())])
def test_what_is_no_loss_is_refused(layers, loss, message):
    with pytest.raises(InputError, match=message):
        as_model((layers, loss))


@pytest.mark.parametrize("returned", [torch.ones(()), (torch.ones(2), 2), (1.0, 2), None, (torch.ones(()),)])
def test_a_loss_without_a_sum_or_a_count_is_refused(returned):
    with pytest.raises(InputError, match=r"returned .*, not \(sum, count\)"):
        as_model(([nn.Tanh()], lambda output, targets: returned)).loss(torch.ones(2), None)
