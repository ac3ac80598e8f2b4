"""What a GPU makes of it: python scripts/bench/gpu.py

1. One rank (depth=1) beside a plain PyTorch loop of the same GPT with the same precision and optimizer: tokens/s, and
   the share of the device's peak.
2. Ranks that share the GPU (D = 2 and 4): their losses beside those of one rank, in fp32 and bf16.
3. The bandwidth of staging between device and pinned host memory.

Prints a table, and with --json FILE writes the same. Takes a few minutes on one GPU; without one it exits with 2.
`--device cpu` tries the script itself on a tiny model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _bench import run_ours, save, show

PEAK_FLOPS_PER_S = {  # dense bf16, from the makers' data sheets
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
LARGE = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50304, "tokens": 1024, "samples": 32, "steps": 20}
SMALL = {"layers": 8, "hidden": 256, "heads": 8, "vocabulary": 1024, "tokens": 128, "samples": 16, "steps": 10}
TINY = {"layers": 4, "hidden": 32, "heads": 2, "vocabulary": 64, "tokens": 16, "samples": 8, "steps": 4}
MICRO_BATCHES, WARMUP, LEARNING_RATE = 4, 3, 1e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of losses, relative


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # a process of the bench: what it does, as JSON
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("scripts/bench/gpu.py needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    if args.part:
        asked = json.loads(args.part)
        found = PARTS[asked.pop("what")](device=args.device, **asked)
        if found is not None:
            print(json.dumps(found), flush=True)
        return 0
    results = measure(args.device)
    tell(results)
    save(args.json, results)
    return int(not all(row["equal"] for row in results["shared"]))


def measure(device: str) -> dict[str, Any]:
    large, small = (LARGE, SMALL) if device == "cuda" else (TINY, TINY)
    facts = part(1, device, what="device")
    speeds = {
        (what, precision): part(1, device, what=what, shape=large, precision=precision, **more)
        for precision in ("bf16", "fp32")
        for what, more in (("plain", {}), ("pipeline", {"scheme": "1f1b"}))
    }
    shared = []
    for precision in ("fp32", "bf16"):
        alone = part(1, device, what="pipeline", shape=small, precision=precision, scheme="1f1b")["losses"]
        for depth, scheme in ((2, "1f1b"), (2, "chimera"), (4, "1f1b"), (4, "chimera")):
            found = part(depth, device, what="pipeline", shape=small, precision=precision, scheme=scheme)
            off = max(abs(a - b) / abs(a) for a, b in zip(alone, found["losses"], strict=True))
            row = {"precision": precision, "depth": depth, "scheme": scheme, "difference": off}
            shared.append({**row, "equal": off < TOLERANCE[precision], **found})
    return {
        **facts,
        "speed": [{"what": what, "precision": precision, **found} for (what, precision), found in speeds.items()],
        "shared": shared,
        "copies": part(1, device, what="copies") if device == "cuda" else {},
    }


def part(ranks: int, device: str, **asked: Any) -> Any:
    """What a job of `ranks` ranks finds."""
    said = run_ours(ranks, "-m", "mpi4py", __file__, "--device", device, "--part", json.dumps(asked))
    return json.loads(said.splitlines()[-1])


def facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": "CPU", "peak_flops_per_s": matmul_flops_per_s(device, 512), "peak_from": "a matmul"}
    name = torch.cuda.get_device_name()
    for known, peak in PEAK_FLOPS_PER_S.items():
        if known in name:
            return {"device": name, "peak_flops_per_s": peak, "peak_from": "data sheet"}
    return {"device": name, "peak_flops_per_s": matmul_flops_per_s(device, 8192), "peak_from": "a matmul"}


def matmul_flops_per_s(device: str, size: int) -> float:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / median(seconds_of(lambda: a @ b, device) for _ in range(10))


def seconds_of(act: Any, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def model_of(shape: dict[str, int]) -> Any:
    from chimera_mpi.models import GPT, gpt

    names = ("layers", "hidden", "heads", "vocabulary")
    return gpt(GPT(**{name: shape[name] for name in names}, positions=shape["tokens"], tied=False, dropout=0.0))


def mini_batch(shape: dict[str, int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [samples, tokens]: numbers that count up, so that there is something to learn."""
    rng = torch.Generator().manual_seed(step % 4)
    first = torch.randint(shape["vocabulary"], (shape["samples"], 1), generator=rng)
    ids = (first + torch.arange(shape["tokens"] + 1)) % shape["vocabulary"]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def summary(shape: dict[str, int], losses: list[float], seconds: list[float]) -> dict[str, Any]:
    from chimera_mpi.runtime.stage import Spec, trace

    entering = (Spec((shape["samples"], shape["tokens"]), torch.int64),)
    flops = 3 * sum(trace(model_of(shape), entering).flops)  # a backward does twice a forward's
    step_s = median(seconds[min(WARMUP, len(seconds) - 1) :])
    tokens_per_s = shape["samples"] * shape["tokens"] / step_s
    return {"losses": losses, "step_s": step_s, "tokens_per_s": tokens_per_s, "flops_per_s": flops / step_s}


def pipeline(device: str, shape: dict[str, int], precision: str, scheme: str) -> dict[str, Any] | None:
    """A step of the library on all ranks of this job."""
    from mpi4py import MPI

    from chimera_mpi import Trainer

    world, losses, seconds = MPI.COMM_WORLD, [], []
    keys = {"scheme": scheme, "depth": world.size, "micro_batches": MICRO_BATCHES, "precision": precision, "clip": None}
    with Trainer(world, model_of(shape), learning_rate=LEARNING_RATE, device=device, **keys) as trainer:
        for step in range(shape["steps"]):
            batch = mini_batch(shape, step)
            start = time.perf_counter()
            losses.append(trainer.step(*batch).loss)
            seconds.append(time.perf_counter() - start)
    return summary(shape, losses, seconds) if world.rank == 0 else None


def plain(device: str, shape: dict[str, int], precision: str) -> dict[str, Any]:
    """What one writes without a library: the same layers, masters and sums of gradients in fp32, fused AdamW."""
    from chimera_mpi.models import make_layer

    model, dtype = model_of(shape), DTYPES[precision]
    layers = torch.nn.Sequential(*(make_layer(model, at, 0, dtype, device) for at in range(len(model.layers))))
    masters = [torch.nn.Parameter(p.detach().float()) for p in layers.parameters()]
    groups = [
        {"params": [m for m in masters if m.dim() >= 2], "weight_decay": 0.1},
        {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    for master in masters:
        master.grad = torch.zeros_like(master)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses = []
        for some, wanted in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
            loss, _ = model.loss(layers(some.to(device)), wanted.to(device))
            loss.backward()
            losses.append(loss.detach())
            for master, parameter in zip(masters, layers.parameters(), strict=True):
                master.grad.add_(parameter.grad)
                parameter.grad = None
        for master in masters:
            master.grad.div_(targets.numel())
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, layers.parameters(), strict=True):
                parameter.copy_(master)
                master.grad.zero_()
        return torch.stack(losses).sum().item() / targets.numel()

    losses, seconds = [], []
    for number in range(shape["steps"]):
        batch = mini_batch(shape, number)
        start = time.perf_counter()
        losses.append(step(*batch))
        seconds.append(time.perf_counter() - start)
    return summary(shape, losses, seconds)


def copies(device: str, nbytes: int = 256 << 20) -> dict[str, float]:
    """Bytes/s from and to the device, through the streams that messages take, alone and both at once."""
    from chimera_mpi.runtime.device import CudaStreams

    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    host = [streams.pinned(nbytes, torch.uint8) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = {
        "fetch": lambda: streams.fetch(host[0], there[0], streams.computed()),
        "bring": lambda: streams.bring(there[1], host[1], streams.computed()),
    }
    ways["both"] = lambda: (ways["fetch"](), ways["bring"]())
    return {
        f"{name}_bytes_per_s": nbytes * (1 + (name == "both")) / median(seconds_of(way, device) for _ in range(10))
        for name, way in ways.items()
    }


PARTS = {"device": facts, "pipeline": pipeline, "plain": plain, "copies": copies}


def tell(results: dict[str, Any]) -> None:
    peak = results["peak_flops_per_s"]
    print(f"{results['device']}, peak {peak / 1e12:.1f} TFLOP/s in bf16 ({results['peak_from']})\n")
    names = {"plain": "plain PyTorch", "pipeline": "chimera-mpi, D=1"}
    show(
        "one rank",
        ("", "precision", "tokens/s", "TFLOP/s", "of peak", "loss"),
        [
            (
                names[row["what"]],
                row["precision"],
                f"{row['tokens_per_s']:.0f}",
                f"{row['flops_per_s'] / 1e12:.2f}",
                f"{row['flops_per_s'] / peak:.1%}",
                f"{row['losses'][-1]:.4f}",
            )
            for row in results["speed"]
        ],
    )
    show(
        "ranks that share the device, and the largest relative difference of a loss to one rank's",
        ("", "precision", "tokens/s", "difference", ""),
        [
            (
                f"D={row['depth']} {row['scheme']}",
                row["precision"],
                f"{row['tokens_per_s']:.0f}",
                f"{row['difference']:.1e}",
                "equal" if row["equal"] else "NOT EQUAL",
            )
            for row in results["shared"]
        ],
    )
    for name, rate in results["copies"].items():
        print(f"staging, {name.split('_')[0]}: {rate / 1e9:.1f} GB/s")


if __name__ == "__main__":
    sys.exit(main())
