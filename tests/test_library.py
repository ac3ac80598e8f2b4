"""`Trainer`: a user's model on a user's communicator equals one process; bad input is refused on all ranks."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
from torch import nn

from chimera_mpi.checkpoint import NAME, open_checkpoint, taken
from chimera_mpi.errors import InputError
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.schedule import SCHEMES, STREAMS
from chimera_mpi.trained import open_trained

ROOT = Path(__file__).parent.parent
TOKENS, WIDTH, LAYERS = 3, 6, 10
RATE = 0.01


class Enter(nn.Module):
    """(ids int64 [batch, tokens], weights float [batch, tokens]) -> x, weights, shown bool [batch, tokens]"""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, ids, weights):
        return self.embedding(ids), weights, ids % 3 > 0


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x, weights, shown):
        grown = torch.tanh(self.linear(x)) * shown.unsqueeze(-1)
        return x + self.dropout(grown) * weights.unsqueeze(-1), weights, shown


class Leave(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x, weights, shown):
        return self.scale * self.linear(x).squeeze(-1), shown


def build(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(Enter(), *(Block(dropout) for _ in range(LAYERS - 2)), Leave())


def loss(output, shown, targets):
    wanted, counted = targets
    kept = shown & counted
    return ((output - wanted).square() * kept).sum(), kept.sum()


def mini_batch(seed, samples=11, tokens=TOKENS):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (samples, tokens), generator=rng)
    weights, wanted = torch.randn(2, samples, tokens, generator=rng, dtype=torch.float64)
    return (ids, weights), (wanted, torch.rand(samples, tokens, generator=rng) < 0.8)


class Serial:
    """One process on the whole mini-batch in float64, with the defaults of the configuration."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).double()
        self.optimizer = Recipe("adamw").build(self.model.parameters())

    def mean_loss(self, inputs, targets):
        tensors = inputs
        for layer in self.model:
            tensors = layer(*tensors)
        total, count = loss(*tensors, targets)
        return total / count

    def step(self, inputs, targets, rate=RATE):
        self.optimizer.zero_grad()
        mean = self.mean_loss(inputs, targets)
        mean.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return mean.item(), norm.item()


def trainer(comm, model=None, **keys):
    from chimera_mpi import Trainer

    return Trainer(comm, model or build(), loss, **{"precision": "fp64", "learning_rate": RATE, **keys})


def check_equal(comm, seed=0, samples=(11, 11, 14), **keys):
    """Steps, an evaluation of another size, and the weights."""
    model = build(seed)
    serial, (inputs, targets) = Serial(model), mini_batch(99, 9)
    with trainer(comm, model, **keys) as training:
        for step, size in enumerate(samples):
            batch = mini_batch(1000 * seed + step, size)
            result = training.step(*batch)
            np.testing.assert_allclose(result[:2], serial.step(*batch), rtol=1e-12)
            found = training.evaluate(inputs, targets)
            np.testing.assert_allclose(found, serial.mean_loss(inputs, targets).item(), rtol=1e-12)
        state = training.state_dict()
    assert (state is None) == (comm.rank > 0)
    if state is not None:
        model.double().load_state_dict(state)
        for name, weights in serial.model.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], weights, rtol=1e-11, atol=1e-13)


SYNCHRONOUS = [scheme for scheme in SCHEMES if scheme not in STREAMS]


@pytest.mark.mpi(4)
@pytest.mark.parametrize("scheme", SYNCHRONOUS)
def test_two_replicas_equal_one_process(comm, scheme):
    check_equal(comm, scheme=scheme, depth=2, micro_batches=4)


@pytest.fixture
def shared_folder(comm, tmp_path):
    """One for all ranks."""
    return comm and comm.bcast(tmp_path)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("sharding", ["none", "replicas"])
def test_stopped_and_loaded_it_goes_on_to_the_bit(comm, shared_folder, sharding):
    keys = {"scheme": "chimera", "depth": 2, "micro_batches": 4, "optimizer_sharding": sharding}
    with trainer(comm, **keys) as straight:
        wanted = [straight.step(*mini_batch(step)) for step in range(4)][2:]
        state = straight.state_dict()
    with trainer(comm, **keys) as first:
        for step in range(2):
            first.step(*mini_batch(step))
        path = first.save(shared_folder)
        assert path == shared_folder / "step-00000002"
    with trainer(comm, build(seed=7), **keys) as second:
        second.load(shared_folder)
        assert second.steps_done == 2
        assert [second.step(*mini_batch(step)) for step in (2, 3)] == wanted
        found = second.state_dict()
    if comm.rank == 0:
        assert all(found[name].equal(state[name]) for name in state)


@pytest.mark.mpi(4)
def test_loaded_in_another_layout_it_goes_on_within_rounding(comm, shared_folder):
    with trainer(comm, scheme="zb_v", depth=4, micro_batches=4) as first:
        first.step(*mini_batch(0))
        path = first.save(shared_folder / "runs")
        wanted, state = first.step(*mini_batch(1)), first.state_dict()
    with trainer(comm, build(seed=7), scheme="chimera", depth=2, micro_batches=2) as second:
        second.load(path)
        before = second.state_dict()
        np.testing.assert_allclose(second.step(*mini_batch(1)), wanted, rtol=1e-11)
        second.load(path)  # back again
        np.testing.assert_allclose(second.step(*mini_batch(1)), wanted, rtol=1e-11)
        found = second.state_dict()
    if comm.rank == 0:
        assert set(before) == set(state)
        for name in state:
            torch.testing.assert_close(found[name], state[name], rtol=1e-10, atol=1e-13)


def names_in(comm, folder):
    """As rank 0 sees them."""
    return comm.bcast(sorted(path.name for path in folder.iterdir()) if comm.rank == 0 else None)


@pytest.mark.mpi(2)
def test_of_one_run_the_last_ones_stay_and_of_others_all(comm, shared_folder):
    with trainer(comm, depth=2, micro_batches=2) as training:
        for step in range(4):
            training.step(*mini_batch(step))
            training.save(shared_folder)
            training.save(shared_folder / f"best-{step % 2}")
        assert names_in(comm, shared_folder) == ["best-0", "best-1", "step-00000003", "step-00000004"]
        assert names_in(comm, shared_folder / "best-1") == ["step-00000002", "step-00000004"]
        assert training.save(shared_folder) == shared_folder / "step-00000004"  # there is nothing new
        if comm.rank == 0:
            shutil.rmtree(shared_folder / "step-00000004")
        training.save(shared_folder)
        assert names_in(comm, shared_folder)[2:] == ["step-00000003", "step-00000004"]
        training.load(shared_folder / "step-00000003")
        training.step(*mini_batch(9))
        training.save(shared_folder)
        assert names_in(comm, shared_folder)[2:] == ["step-00000003", "step-00000004", "step-00000004.superseded"]
        training.load(shared_folder / "step-00000004.superseded")  # nothing else there is of its course
        assert training.save(shared_folder) == shared_folder / "step-00000004"
        there = names_in(comm, shared_folder)[2:]
        assert [name for name in there if NAME.fullmatch(name)] == ["step-00000004"]
        assert {"step-00000003.superseded", "step-00000004.superseded1"} < set(there)
    with trainer(comm, depth=2, micro_batches=2) as another:
        another.step(*mini_batch(0))
        another.save(shared_folder, keep=1)
        assert [name for name in names_in(comm, shared_folder) if NAME.fullmatch(name)] == ["step-00000001"]
        assert {"step-00000003.superseded", "step-00000004.superseded2"} <= set(names_in(comm, shared_folder))


@pytest.mark.mpi(2)
def test_of_a_folder_the_last_whole_one_is_loaded(comm, shared_folder):
    with trainer(comm, depth=2, micro_batches=2) as training:
        paths = []
        for step in range(2):
            training.step(*mini_batch(step))
            paths.append(training.save(shared_folder))
        damage(comm, paths[1])
        told = pytest.warns(UserWarning, match=f"passed over: {paths[1]}.* is damaged")
        with told if comm.rank == 0 else nullcontext():
            training.load(shared_folder)
        assert training.steps_done == 1
        assert f"try load('{paths[0]}')" in refusal(lambda: training.load(paths[1]))
        damage(comm, paths[0])
        assert "no other checkpoint is whole: take another folder" in refusal(lambda: training.load(shared_folder))


def damage(comm, path):
    """Returns what was there."""
    file = path / "layer-00003.safetensors"
    content = file.read_bytes()
    comm.Barrier()
    if comm.rank == 0:
        file.write_bytes(b"cut short")
    comm.Barrier()
    return file, content


@pytest.mark.mpi(2)
def test_what_was_loaded_and_is_gone_before_the_first_step_is_not_gone_on_without(comm, shared_folder):
    with trainer(comm, depth=2, micro_batches=2) as first:
        first.step(*mini_batch(0))
        path = first.save(shared_folder)
        wanted = first.step(*mini_batch(1))
    with trainer(comm, build(seed=7), depth=2, micro_batches=2) as second:
        second.load(path)
        file, content = damage(comm, path)
        assert "layer-00003.safetensors is damaged" in refusal(second.state_dict)
        for _ in range(2):
            assert "layer-00003.safetensors is damaged" in refusal(lambda: second.step(*mini_batch(1)))
        if comm.rank == 0:
            file.write_bytes(content)
        comm.Barrier()
        assert second.step(*mini_batch(1)) == wanted


@pytest.mark.mpi(2)
def test_what_was_loaded_is_told_in_the_precision_of_the_trainer(comm, shared_folder):
    keys = {"depth": 2, "micro_batches": 2, "precision": "bf16"}
    with trainer(comm, **keys) as first:
        first.step(*mini_batch(0))
        path, wanted = first.save(shared_folder), first.state_dict()
    with trainer(comm, build(seed=7), **keys) as second:
        second.load(path)
        found = second.state_dict()
    if comm.rank == 0:
        assert list(found) == list(wanted) and all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.mpi(1)
def test_its_checkpoints_are_of_no_model_that_the_commands_know(comm, shared_folder):
    with trainer(comm, micro_batches=2) as training:
        training.step(*mini_batch(0))
        path = training.save(shared_folder)
    from chimera_mpi.trainer import OF_COMMANDS

    assert not OF_COMMANDS & open_checkpoint(path).facts["config"].keys()
    assert "is of model=a module of one's own: give one of a gpt or a bert" in refusal(lambda: open_trained(path))


@pytest.mark.mpi(2)
def test_what_cannot_be_saved_or_loaded_is_refused(comm, shared_folder):
    with trainer(comm, depth=2, micro_batches=2) as training:
        assert "nothing to save before the first step" in refusal(lambda: training.save(shared_folder))
        for name in (shared_folder / "none", "auto"):
            assert f"there is no checkpoint {name}" in refusal(lambda name=name: training.load(name))
        training.step(*mini_batch(0))
        for keep in (0, -1, "2", 1.0):
            refused = refusal(lambda keep=keep: training.save(shared_folder, keep=keep))
            assert f"keep={keep!r} leaves no checkpoint: give a whole number from 1 up" in refused
        with taken(shared_folder) if comm.rank == 0 else nullcontext():
            (shared_folder / "step-00000009.part").mkdir(exist_ok=True)  # of one that is being written
            refused = refusal(lambda: training.save(shared_folder, keep=1))
            assert f"{shared_folder} is being written by process" in refused
            assert [left.name for left in shared_folder.glob("step-*")] == ["step-00000009.part"]
        path = training.save(shared_folder, keep=1)
        assert comm.rank or [left.name for left in shared_folder.iterdir()] == [path.name]
        assert "make the same calls on all ranks" in refusal(lambda: training.load(f"{path}{comm.rank}"))
    with trainer(comm, depth=2, micro_batches=2, optimizer="sgd") as other:
        assert "optimizer=adamw, not sgd" in refusal(lambda: other.load(path))
    with trainer(comm, build()[:6] + build()[9:], depth=2, micro_batches=2) as shorter:
        assert f"{path} is of a model of 10 layers, not 7" in refusal(lambda: shorter.load(path))


@pytest.mark.mpi(4)
@pytest.mark.parametrize(
    "keys",
    [
        {"scheme": "chimera", "optimizer_sharding": "replicas"},
        {"scheme": "1f1b", "recompute": "layer", "partition": "flops"},
        {"scheme": "chimera", "concat": "halving", "message_limit_bytes": 64, "micro_batches": 2},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_one_pipeline_equals_one_process(comm, keys):
    check_equal(comm, **{"depth": 4, "micro_batches": 4, **keys})


@pytest.mark.mpi(8)
def test_two_halves_of_a_communicator_train_at_once(comm):
    half = comm.Split(comm.rank % 2)
    check_equal(half, seed=1 + comm.rank % 2, scheme="chimera", depth=2, micro_batches=2)
    half.Free()


@pytest.mark.mpi(2)
def test_shapes_and_rates_may_change(comm):
    model = build()
    serial = Serial(model)
    training = trainer(comm, model, depth=2, learning_rate=lambda step: RATE / (step + 1))
    for step, shape in enumerate([(8, 3), (9, 5), (4, 1), (8, 3)]):
        batch = mini_batch(step, *shape)
        result = training.step(*batch)
        np.testing.assert_allclose(result[:2], serial.step(*batch, RATE / (step + 1)), rtol=1e-12)
        assert result.learning_rate == RATE / (step + 1)
    training.close()


@pytest.mark.mpi(4)
def test_all_ranks_start_from_the_weights_of_the_first(comm):
    serial, batch = Serial(build(seed=0)), mini_batch(0)
    training = trainer(comm, build(seed=comm.rank), scheme="chimera", depth=2, message_limit_bytes=100)
    np.testing.assert_allclose(training.step(*batch)[:2], serial.step(*batch), rtol=1e-12)
    training.close()


@pytest.mark.mpi(2)
def test_the_state_before_a_step_is_that_of_the_user(comm):
    named = nn.Sequential(OrderedDict((f"part{n}", layer) for n, layer in enumerate(build())))
    tied = [nn.Linear(4, 4), nn.Linear(4, 4)]
    tied[1].weight = tied[0].weight
    for model, same in ((named, named), (tied, nn.Sequential(*tied))):
        with trainer(comm, model, depth=2) as training:
            state = training.state_dict()
            if comm.rank == 0:
                assert list(state) == list(same.state_dict())
                assert all(torch.equal(state[name], t.double()) for name, t in same.state_dict().items())


@pytest.mark.mpi(2)
def test_tied_layers_and_a_loss_of_their_own(comm):
    from chimera_mpi import Trainer

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    layers[2].weight = layers[0].weight
    pair = layers, lambda output, targets: ((output - targets).square().sum(), targets.numel())
    with Trainer(comm, pair, precision="fp64", depth=2, micro_batches=2) as training:
        x = torch.linspace(0, 1, 16, dtype=torch.float64).view(4, 4)
        before = training.evaluate(x, 1 - x)
        np.testing.assert_allclose(
            before, (nn.Sequential(*copy.deepcopy(layers)).double()(x) + x - 1).square().mean().item()
        )
        training.step(x, 1 - x)
        state = training.state_dict()
        assert state is None or torch.equal(state["0.weight"], state["2.weight"])


@pytest.mark.mpi(2)
def test_the_callers_random_numbers_stay_alike(comm):
    training = trainer(comm, build(dropout=0.5), depth=2)
    torch.manual_seed(3)
    wanted = torch.randn(4)
    torch.manual_seed(3)
    before = training.evaluate(*mini_batch(0))
    first = training.step(*mini_batch(0))
    assert torch.equal(torch.randn(4), wanted)
    assert first.loss != before  # dropout in a step, none in an evaluation
    training.close()


@pytest.mark.mpi(1)
@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"warmup_steps": 0, "steps": 3}, [1, 0.5, 0, 0]),
        ({"warmup_steps": 1, "steps": 3, "minimum_learning_rate": RATE / 2}, [1, 1, 0.5, 0.5]),
    ],
    ids=str,
)
def test_learning_rates(comm, keys, rates):
    training = trainer(comm, **keys)
    found = [training.step(*mini_batch(0)).learning_rate for _ in rates]
    np.testing.assert_allclose(found, [RATE * rate for rate in rates], atol=1e-18)


def refusal(act):
    with pytest.raises(InputError) as refused:
        act()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def rate_of_infinity(step):
    return float("inf")


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dept": 2}, "unknown key 'dept': did you mean 'depth'?"),
        ({"depth": 0}, "depth=0: input should be greater than or equal to 1"),
        ({"depth": 3}, "depth 3 does not divide the 2 MPI ranks"),
        ({"optimizer": "adam"}, "optimizer='adam': input should be 'adamw', 'sgd'"),
        ({"learning_rate": -1}, "learning_rate=-1: input should be greater than 0"),
        ({"scheme": "chimaera", "depth": 2}, "did you mean 'chimera'?"),
        ({"scheme": "pipedream", "depth": 2}, "take another scheme, such as 1f1b or chimera"),
        ({"hidden": 3}, "hidden is a key of what the command line trains"),
        ({"minimum_learning_rate": 1e-4}, "give steps too"),
        ({"learning_rate": rate_of_infinity, "steps": 3}, "steps and a function for learning_rate"),
        ({"model": [build(), 3]}, "layer 1 is a int, not a module"),
        ({"model": build().to("meta")}, "layer 0 of the model is on meta: build it on the CPU"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_keys_are_refused(comm, keys, message):
    """On all ranks, though only the last is wrong."""
    given = keys if comm.rank == 1 else {}
    assert message in refusal(lambda: trainer(comm, **given))


@pytest.mark.mpi(2)
def test_a_device_that_is_not_there_is_refused_before_there_is_anything_to_close(comm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("chimera_mpi.trainer.Grid", None)
    assert "torch sees no CUDA device" in refusal(lambda: trainer(comm, device="cuda"))


@pytest.mark.mpi(2)
def test_ranks_that_differ_are_refused(comm):
    from chimera_mpi import Trainer

    assert "different models" in refusal(lambda: trainer(comm, list(build())[comm.rank :]))
    assert "different keys" in refusal(lambda: trainer(comm, seed=comm.rank))
    assert "not an intracommunicator" in refusal(lambda: Trainer(None, build(), loss))


@pytest.mark.mpi(4)
def test_wrong_batches_are_refused_on_all_ranks_and_training_goes_on(comm):
    training, (inputs, targets) = trainer(comm, depth=2, micro_batches=2), mini_batch(0)
    serial = Serial(build())
    wrong = comm.rank == 2
    ids, weights = inputs
    for given, message in (
        ((inputs, mini_batch(0, 12)[1]), "inputs and targets have 11 and 12 samples"),
        (([1, 2], targets), "inputs has a int in it"),
        ((3, targets), "inputs: give a tensor or a tuple of tensors, not int"),
        (((), targets), "inputs: give a tensor or a tuple of tensors, not tuple"),
        ((torch.tensor(1), targets), "inputs has int64 [] on cpu"),
        ((inputs, targets[0].to("meta")), "on meta: give [samples, ...] on the CPU"),
        (mini_batch(0, 3), "a mini-batch of 3 samples does not fill 4 micro-batches"),
        (mini_batch(0, 12), "rank 0 is at step 0, learning rate 0.01, inputs int64 [11, 3], float64 [11, 3] and"),
        (mini_batch(1), "make the same calls on all ranks"),  # other values
    ):
        assert message in refusal(lambda given=given: training.step(*(given if wrong else (inputs, targets))))
    assert ", rank 2 at evaluate" in refusal(lambda: (training.evaluate if wrong else training.step)(inputs, targets))
    assert "rank 2 at state_dict" in refusal(lambda: training.state_dict() if wrong else training.step(inputs, targets))
    assert "the model does not take inputs int64 [11, 3] and" in refusal(lambda: training.step(ids, targets))
    assert "the loss does not take outputs float64" in refusal(lambda: training.step(inputs, weights))
    np.testing.assert_allclose(training.step(inputs, targets)[:2], serial.step(inputs, targets), rtol=1e-12)
    assert "rank 2 at close" in refusal(lambda: training.close() if wrong else training.step(inputs, targets))
    training.close()
    training.close()
    assert "this Trainer is closed" in refusal(lambda: training.step(inputs, targets))


@pytest.mark.mpi(2)
def test_wrong_losses_and_rates_are_refused(comm):
    from chimera_mpi import Trainer

    def mean(output, shown, targets):
        return loss(output, shown, targets)[0]

    refused = refusal(lambda: Trainer(comm, build(), mean, depth=2).step(*mini_batch(0)))
    assert "loss(*outputs, targets) returned a tensor [], not (sum, count)" in refused
    training = trainer(comm, learning_rate=rate_of_infinity if comm.rank else lambda step: RATE)
    assert "learning_rate(0) is inf" in refusal(lambda: training.step(*mini_batch(0)))


def blocks():
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("code", blocks(), ids=lambda code: "training" if "Trainer" in code else "schedule")
def test_the_examples_of_the_readme_run(tmp_path, code):
    (tmp_path / "example.py").write_text(code)
    done = launch.run(4 if "Trainer" in code else 1, [sys.executable, "-m", "mpi4py", "example.py"], 60, tmp_path)
    assert done.returncode == 0, done.stderr
    if "Trainer" in code:
        losses = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]
        assert len(losses) >= 2 and losses[-1] < losses[0] / 2


def test_schedules_and_the_package_need_neither_torch_nor_mpi():
    code = (
        "import sys, chimera_mpi\n"
        "from chimera_mpi.schedule import build\n"
        "assert not {'torch', 'mpi4py', 'pydantic'} & set(sys.modules)\n"
        "assert not hasattr(chimera_mpi, 'trainers')\n"
        "from chimera_mpi import Trainer\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
