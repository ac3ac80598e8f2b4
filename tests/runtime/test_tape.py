"""A backward in two halves gives what a whole one gives, whatever the graph, and lets go of what it has used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_mpi.runtime.tape import Tape, start_graph


class Doubled(torch.autograd.Function):
    """Asks for what it saved twice, as one's own functions may."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (x + again)


def offloaded(segment, x):
    """What is saved is in the hands of hooks of the model's own."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return segment(x)


one, two = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
norm = nn.LayerNorm(4, elementwise_affine=False, dtype=torch.float64)

SEGMENTS = {
    "a chain": lambda x: (F.gelu(two(F.gelu(one(x)))),),
    "a residual": lambda x: (x + two(F.gelu(norm(one(x)))),),
    "one weight twice": lambda x: (one(F.gelu(one(x))),),
    "one weight on the way and aside": lambda x: (one(x).sigmoid() * F.gelu(one.weight.sum() * two.bias),),
    "an output aside": lambda x: (one(x).exp(), F.gelu(two.weight).sum()),
    "two outputs of one node": lambda x: tuple(one(x).exp().unbind(1)),
    "the input itself": lambda x: (x, two(x).tanh()),
    "nothing to train": lambda x: (x.exp() * x,),
    "a list": lambda x: (torch.stack([one(x).exp(), x.exp()]).prod(0),),
    "a function of one's own": lambda x: (two(Doubled.apply(one(x))),),
    "hooks of one's own": lambda x: (offloaded(lambda y: two(F.gelu(one(y))), x),),
    "checkpoints": lambda x: (checkpoint(lambda y: two(F.gelu(one(y))).exp(), x, use_reentrant=False),),
}


def gradients(segment, recompute, back):
    for layer in (one, two):
        layer.zero_grad()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    tape = Tape([lambda tensors: segment(tensors[0])], recompute)
    outputs = tape.forward(start_graph((x,)))
    entering = back(tape, tuple(torch.linspace(1, 2, t.numel(), dtype=t.dtype).view_as(t) for t in outputs))
    return [*entering, *(p.grad for layer in (one, two) for p in layer.parameters())]


def in_halves(tape, leaving):
    entering = tape.backward_inputs(leaving)
    tape.backward_weights()
    return entering


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=list(SEGMENTS))
def test_both_halves_give_the_whole(segment, recompute):
    whole, halves = (gradients(segment, recompute, back) for back in (Tape.backward, in_halves))
    torch.testing.assert_close(halves, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("back", [Tape.backward, Tape.backward_inputs])
def test_a_write_to_what_was_saved_is_found_out(back):
    def segment(tensors):
        saved = one(tensors[0])
        outputs = (two(F.gelu(saved)),)
        saved.add_(1)
        return outputs

    tape = Tape([segment], recompute=False)
    outputs = tape.forward(start_graph((torch.ones(3, 4, dtype=torch.float64),)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        back(tape, (torch.ones_like(outputs[0]),))
