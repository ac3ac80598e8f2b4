"""Training as its users start it: equal logs in any layout, refusals that touch nothing, failures that end all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import launch
import numpy as np
import pytest
import small

from chimera_mpi import report
from chimera_mpi.cli import main
from chimera_mpi.commands._ranks import refuse_singletons
from chimera_mpi.commands.train import _tell_end
from chimera_mpi.config import Config, load, presets, schedule_of
from chimera_mpi.data import Rules, prepare
from chimera_mpi.errors import InputError
from chimera_mpi.predict import simulate
from chimera_mpi.predict.partition import by_thirds
from chimera_mpi.runlog import read_run
from chimera_mpi.schedule import needs
from chimera_mpi.stopping import AGAIN, End
from chimera_mpi.train import _is_sampled, plan_job

ROOT = Path(__file__).parent.parent
STEPS = 6
LONG = "x" * 300  # no file has such a name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("train"), steps=STEPS, precision="fp64", learning_rate=0.01)


def train(ranks, folder, log, *overrides, **options):
    return launch.chimera(ranks, "train", "small.toml", f"log={log}", *overrides, cwd=folder, **options)


@pytest.fixture(scope="module")
def serial(folder):
    done = train(1, folder, "serial.h5", "scheme=gpipe", "micro_batches=4")
    assert done.returncode == 0, done.stderr
    return read_run(folder / "serial.h5")


LAYOUTS = {  # ranks and keys
    "four-workers.h5": (4, "scheme=chimera", "depth=4", "micro_batches=4"),
    "two-groups.h5": (4, "scheme=chimera", "depth=2", "micro_batches=2"),
    "by-costs.h5": (2, "scheme=zb_v", "depth=2", "micro_batches=4", "order=costs"),
}


@pytest.fixture(scope="module")
def logged(folder):
    """The log of a layout, which is trained when it is first asked for."""

    @cache
    def path_of(name):
        ranks, *keys = LAYOUTS[name]
        done = train(ranks, folder, name, *keys)
        assert done.returncode == 0, done.stderr
        return folder / name

    return path_of


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_log_is_that_of_one_process(logged, serial, name):
    run = read_run(logged(name))
    for column in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(run.steps[column], serial.steps[column], rtol=1e-9)
    np.testing.assert_allclose(run.evaluations["loss"], serial.evaluations["loss"], rtol=1e-9)
    assert list(run.steps["step"]) == list(range(STEPS))
    assert list(run.steps["samples"]) == [12] * STEPS
    assert list(run.steps["tokens"]) == [12 * 16] * STEPS
    assert list(run.steps["warmup"]) == [True, True] + [False] * (STEPS - 2)
    np.testing.assert_allclose(
        run.steps["flops_per_s"],
        serial.steps["flops_per_s"] * serial.steps["seconds"] / run.steps["seconds"],
        rtol=1e-5,
    )
    assert run.workers["compute_s"].shape == (STEPS, LAYOUTS[name][0])
    assert all((run.workers[column] >= 0).all() for column in run.workers)
    assert ((run.steps["bubble_ratio"] >= 0) & (run.steps["bubble_ratio"] < 1)).all()


@pytest.mark.timeout(300)
def test_sixteen_ranks_on_few_cores(folder):
    """More ranks than cores: the same losses as one process, whatever the oversubscription."""
    deep = ("layers=14", "sequence_length=8", "mini_batch_size=16", "steps=2", "optimizer_sharding=replicas")
    for log, ranks, scheme in (("one.h5", 1, "gpipe"), ("sixteen.h5", 16, "chimera")):
        done = train(ranks, folder, log, *deep, f"scheme={scheme}", f"depth={ranks}", "micro_batches=16", timeout_s=140)
        assert done.returncode == 0, done.stderr
    alone, sixteen = read_run(folder / "one.h5"), read_run(folder / "sixteen.h5")
    np.testing.assert_allclose(sixteen.steps["loss"], alone.steps["loss"], rtol=1e-9)
    np.testing.assert_allclose(sixteen.steps["grad_norm"], alone.steps["grad_norm"], rtol=1e-9)


@pytest.mark.parametrize("name", ["four-workers.h5", "by-costs.h5"])
def test_the_spans_are_those_of_the_schedule(logged, name):
    run = read_run(logged(name))
    schedule = report.plan_of(run).schedule
    assert run.sampled_steps == (1, 3, 5)
    for step in run.sampled_steps:
        timeline = run.timeline(step, schedule)
        for row, order in zip(timeline.rows, schedule.orders, strict=True):
            assert tuple(span.op for span in row) == order
        starts = {span.op: span.start_s for span in timeline.spans}
        for span in timeline.spans:  # clocks are aligned: nothing begins before its cause
            assert all(span.start_s > starts[need] for need in needs(schedule, span.op))


def test_the_end_of_a_run_is_its_report(folder, logged, capsys):
    assert main(["report", str(logged("four-workers.h5")), "--svg", str(folder / "step.svg")]) == 0
    out = capsys.readouterr().out
    for words in ("validation", "unigram entropy", "samples/s", "planned", "measured", "1f1b planned", "F0"):
        assert words in out
    for words in ("memory, MB", "predicted  ", "grew by  "):
        assert words in out
    assert (folder / "step.svg").read_text().startswith("<svg")


def test_the_log_has_the_memory_that_was_predicted(logged):
    """Of each worker, by parts; the process grew by it and by what torch and MPI keep."""
    run = read_run(logged("four-workers.h5"))
    predicted = json.loads(run.attributes["predicted_memory"])
    assert len(predicted) == 4 and run.attributes["machine"] == "none"
    numbers = sum(worker["weights_bytes"] for worker in predicted) / 8
    assert numbers == 2 * run.attributes["parameters"] + 257 * 16 * 2  # two copies, of the tied matrix two in each
    assert all(worker["state_bytes"] == 2 * worker["weights_bytes"] for worker in predicted)
    before = json.loads(run.attributes["held_before_bytes"])
    grew = run.workers["peak_bytes"][-1] - before
    assert all(more > worker["total_bytes"] for more, worker in zip(grew, predicted, strict=True))


def test_a_log_that_is_gone_changes_nothing_of_how_a_run_ended(tmp_path, capsys):
    saver = SimpleNamespace(newest=tmp_path / "step-00000007")
    run = SimpleNamespace(log=SimpleNamespace(path=tmp_path / "moved.h5"), saver=saver, recorder=None)
    _tell_end(run, End("SIGUSR1 on rank 0: stopped", AGAIN))
    told, wrong = capsys.readouterr()
    assert f"there is no summary: {tmp_path}/moved.h5 cannot be read" in told and "step-00000007" in told
    assert wrong == "chimera-mpi: SIGUSR1 on rank 0: stopped\n"


def test_a_run_goes_on_when_nobody_reads_what_it_says(folder):
    keys = ("depth=1", "log=unread.h5", "steps=40", "eval_every=1", "checkpoint=unread")
    command = [sys.executable, "-m", "chimera_mpi", "train", "small.toml", *keys]
    with subprocess.Popen(
        command, cwd=folder, env=launch.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        while not run.stdout.readline().startswith("step 1/"):
            assert run.poll() is None
        run.stdout.close()
        assert (run.stderr.read(), run.wait()) == ("", 0)
    assert len(read_run(folder / "unread.h5").steps["step"]) == 40
    assert (folder / "unread" / "step-00000040").is_dir()


def test_a_run_may_do_without_evaluations(folder):
    prepare(folder / "all.h5", [small.TEXT], Rules(validation_fraction=0))
    done = train(1, folder, "unjudged.h5", "depth=1", "eval_every=none", "data=all.h5")
    assert done.returncode == 0, done.stderr
    run = read_run(folder / "unjudged.h5")
    assert len(run.steps["step"]) == STEPS and not len(run.evaluations["step"])


def test_why_a_run_stopped_is_its_code_though_nobody_reads_it(folder):
    keys = ("depth=1", "log=unheard.h5", "steps=100000", "eval_every=1", "checkpoint=unheard")
    command = [sys.executable, "-m", "chimera_mpi", "train", "small.toml", *keys]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=launch.environment(), text=True, **both) as run:
        while "/100000" not in run.stdout.readline():
            assert run.poll() is None
        run.stdout.close()
        run.terminate()
        assert run.wait(60) == AGAIN


def test_an_existing_log_is_not_touched(folder):
    (folder / "taken.h5").write_bytes(b"somebody's work")
    done = train(2, folder, "taken.h5", "depth=2")
    assert done.returncode == 2
    assert done.stderr.count("chimera-mpi:") == 1
    assert "taken.h5 exists" in done.stderr
    assert (folder / "taken.h5").read_bytes() == b"somebody's work"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data=nowhere.h5",), "no data file nowhere.h5: make it with"),
        (("machine=small-bx", "data=nowhere.h5"), "'small-bx' is neither a machine nor a file"),
        (("depth=4",), "depth 4 does not divide the 2 MPI ranks: try depth = 1, 2"),
    ],
    ids=str,
)
def test_refused_on_all_ranks_by_one_line(folder, overrides, message):
    done = train(2, folder, "refused.h5", *overrides, timeout_s=30)
    assert done.returncode == 2
    assert done.stderr.count("chimera-mpi:") == 1 and message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "refused.h5").exists()


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        ({"scheme": "chimera", "depth": 5}, 10, "chimera needs an even depth, not 5: try depth = 2, 10$"),
        ({"scheme": "chimera", "depth": 5}, 5, "no depth fits 5 ranks, start 4 or 8 ranks with depth=4$"),
        ({"scheme": "chimera", "depth": 3}, 2, "depth 3 does not divide the 2 MPI ranks: try depth = 2$"),
        ({"scheme": "chimera", "depth": 1}, 1, "not 1: .* no depth fits 1 rank, start 2 ranks with depth=2$"),
        (
            {"scheme": "chimera", "depth": 2},
            3,
            "3 MPI ranks: with all else as asked no depth fits 3 ranks, start 2 or 4 ranks$",
        ),
        ({"depth": 3}, 4, "depth 3 does not divide the 4 MPI ranks: try depth = 1, 2, 4$"),
        ({"scheme": "chimera", "depth": 2, "survive": "replicas", "spares": 1}, 4, "spares=1, start 3 or 5 ranks$"),
        ({"scheme": "chimera", "depth": 2, "pairs": 2}, 4, "try pairs = 1$"),
        ({"scheme": "chimera", "depth": 8, "pairs": 2}, 12, "try depth = 4, 12$"),
        ({"scheme": "chimera", "depth": 8, "layers": 3}, 16, "8 stages .* the model has 5: try depth = 2, 4$"),
        ({"scheme": "chimera", "depth": 5, "layers": 1}, 9, "start 8 or 10 ranks with depth=2$"),
        ({"scheme": "chimaera"}, 1, "unknown scheme 'chimaera': did you mean 'chimera'?"),
        ({"scheme": "gpipe", "pairs": 2}, 1, "gpipe has no option 'pairs'"),
        ({"scheme": "chimera", "depth": 4, "pairs": 3}, 4, "try pairs = 1, 2"),
        ({"depth": 4, "layers": 1}, 4, "4 stages need as many layers, and the model has 3: try depth = 1, 2$"),
        ({"mini_batch_size": 3}, 1, "a mini-batch of 3 samples does not fill 4 micro-batches"),
        ({"mini_batch_size": 30, "micro_batch_size": 8}, 1, "mini_batch_size=30 is not 1 replicas x 4"),
        ({"micro_batches": 10**9}, 1, "try micro_batches=1000000 or fewer"),
        ({"learning_rate": 1e-5, "minimum_learning_rate": 1e-4}, 1, "minimum_learning_rate=0.0001 is above"),
        ({"scheme": "pipedream_2bw", "depth": 8}, 8, "set micro_batches=8"),
        ({"partition": (1, 2), "depth": 4}, 4, "give 3 rising numbers from 1 to 13"),
        ({"sequence_length": 2048}, 1, "sequence_length=2048 is more than positions=1024"),
        ({"heads": 7}, 1, "hidden=768 does not divide into heads=7"),
        (
            {"depth": 2, "scheme": "pipedream", "precision": "fp16", "tied": False},
            2,
            "skipping an overflow of fp16 needs all: take bf16",
        ),
        ({"depth": 2, "optimizer": "lamb", "optimizer_sharding": "replicas"}, 2, "lamb looks at whole tensors"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(overrides, ranks, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace("?", r"\?")):
        plan_job(Config(**overrides), ranks)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dept=4", "unknown key 'dept': did you mean 'depth'?"),
        ("steps=0", "steps=0: input should be greater than or equal to 1"),
        ("steps=many", "steps='many': input should be a valid integer"),
        ("steps", "'steps' is not key=value"),
        ("clip=-1", "clip=-1: input should be greater than 0"),
        ("clip=inf", "clip=inf: input should be a finite number"),
        ("depth=true", "depth=true: input should be a valid integer"),
        ("hidden=99999999999", "hidden=99999999999: input should be less than or equal to 1000000; try hidden=768"),
        ("threads=100000", "threads=100000: input should be less than or equal to 1024"),
        ("log=", "'log=' has no value"),
        ("log=r\udcff.h5", r"log='r\udcff.h5': it is not UTF-8: give another name; try log=auto, or none"),
        ("checkpoint=\udcff", r"checkpoint='\udcff': it is not UTF-8: give another name; try checkpoint=none"),
        ("scheme=chi\nmera", "scheme"),
        ("steps=1\nlayers=3", "steps='1\\nlayers=3'"),
        ("optimizer=adam", "optimizer='adam': input should be 'adamw', 'sgd'"),
        ("watchdog_s=-1", "watchdog_s=-1: input should be greater than 0; try watchdog_s=auto"),
        ("watchdog_s=1e12", "watchdog_s=1000000000000.0: input should be less than or equal to 1000000000"),
        ("recompute=0", "recompute=0: input should be greater than or equal to 1; try recompute=none"),
        ("eval_every=0", "try eval_every=20, or none"),
        ("steps=none", "steps=none: input should be a valid integer; try steps=100"),
        ("pairs=0", "pairs=0: input should be greater than or equal to 1; try pairs=none"),
        ("tied=maybe", "; try tied=true"),
        ("partition=[0,3]", "partition=[0, 3]: input should be greater than or equal to 1; try partition=uniform"),
    ],
)
def test_wrong_keys_and_values_are_refused(override, message):
    with pytest.raises(InputError) as refused:
        plan_job(load("gpt-tiny", [override]), 1)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "clip"), [([], 1.0), (["scheme=pipedream_2bw"], None), (["scheme=pipedream", "clip=0.5"], 0.5)]
)
def test_asynchronous_schemes_clip_only_when_asked_to(overrides, clip):
    assert load("gpt-tiny", overrides).clip == clip


@pytest.mark.parametrize("first", [0, 12_345])
def test_sampled_steps_become_rarer(first):
    """A log of any length has few spans, and yet at any moment some of not long ago."""
    last = first + 100_000
    sampled = [step for step in range(first, last) if _is_sampled(range(step, step + 1), 10, first, last)]
    assert len(sampled) < 128 + 64 * 7
    assert all((step + 1) % 10 == 0 for step in sampled[:128]) and sampled[-1] == last - 1
    assert all(b - a <= max(20, (b - first) / 64) for a, b in pairwise(sampled))
    assert sum(_is_sampled(range(step, step + 50), 1, 0, 500) for step in range(0, 500, 50)) == 10


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("[" * 5000, f"'{39 * '['}..."),
        ("[" * 200 + "]" * 200, f"{40 * '['}..."),
        ("0x" + "f" * 5000, "(int, too long to show)"),
        ("[0x" + "f" * 5000 + "]", "(list, too long to show)"),
        ("9" * 5000, f"'{39 * '9'}..."),
    ],
    ids=["deep", "less deep", "hexadecimal", "of such", "decimal"],
)
def test_endless_values_are_refused_in_a_line(tmp_path, value, shown):
    with pytest.raises(InputError, match=rf"^seed={re.escape(shown)}: input should be .*; try seed=0$"):
        load("gpt-tiny", [f"seed={value}"])
    (tmp_path / "endless.toml").write_text(f"seed = {value}")
    with pytest.raises(InputError, match=r"endless.toml is not a TOML file: .*|^seed=.*: input should be"):
        load(str(tmp_path / "endless.toml"))


def test_a_file_is_utf8_in_any_locale(tmp_path):
    (tmp_path / "run.toml").write_bytes("log = 'é.h5'".encode())
    read = f"from chimera_mpi.config import load; print(ascii(load({str(tmp_path / 'run.toml')!r}).log))"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", read], env=plain, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("'\\xe9.h5'\n", "")


@pytest.mark.parametrize("name", ["20240101", "2024-01-01", "1.5", "0x1f", "[1]", "1 # one", "'", "é"])
def test_a_name_may_look_like_another_value(name):
    config = load("gpt-tiny", [f"{key}={name}" for key in ("checkpoint", "data", "log", "resume", "machine")])
    assert (config.checkpoint, config.data) == (Path(name), Path(name))
    assert (config.log, config.resume, config.machine) == (name, name, name)


def test_names_may_be_quoted_and_other_keys_take_what_toml_has():
    config = load("gpt-tiny", ["log='2024.h5'", 'checkpoint="none"', "data=none", "profile=3", "partition=[1,2]"])
    assert (config.log, config.checkpoint, config.data) == ("2024.h5", Path("none"), None)
    assert (config.profile, config.partition) == (3, (1, 2))


def test_a_wrong_source_is_refused(tmp_path):
    with pytest.raises(InputError, match="did you mean 'gpt-tiny'"):
        load("gpt-tyni")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(InputError, match="not a TOML file"):
        load(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize("name", presets())
def test_presets_can_run(name):
    assert plan_job(load(name), 1).sizes


def test_one_size_of_a_batch_follows_from_the_other():
    assert plan_job(load("gpt2-small", ["mini_batch_size=7", "micro_batches=3"]), 1).sizes == (3, 2, 2)


def test_one_rank_inside_of_an_allocation_is_fine():
    refuse_singletons(1, {"SLURM_NTASKS": "4", "PMI_SIZE": "1"})
    refuse_singletons(4, {"SLURM_NTASKS": "4"})


@pytest.mark.parametrize(
    "words",
    [
        [LONG],
        ["small.toml", f"data={LONG}", "log=none"],
        ["small.toml", f"machine={LONG}", "log=none"],
        ["small.toml", f"log={LONG}"],
        ["small.toml", f"log={LONG}", "checkpoint=new", "resume=auto"],
        ["small.toml", f"log={LONG}", "profile=1"],
        ["small.toml", f"checkpoint={LONG}", "log=none"],
        ["small.toml", f"checkpoint={LONG}", "resume=auto", "log=none"],
        ["small.toml", f"resume={LONG}", "log=none"],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "..."),
)
def test_names_that_are_too_long_are_refused_in_a_line(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert main(["train", *words]) == 2
    told, wrong = capsys.readouterr()
    assert not told and wrong.startswith("chimera-mpi: ") and wrong.count("\n") == 1 and LONG in wrong
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_singletons_under_a_launcher_are_refused(folder, monkeypatch, capsys, name):
    for known in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "4")
    monkeypatch.chdir(folder)
    assert main(["train", "small.toml", "log=alone.h5"]) == 2
    err = capsys.readouterr().err
    assert f"{name}=4" in err and "try" in err
    assert not (folder / "alone.h5").exists()


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("config", 1),
        ("data", 1),
        ("build", 0),
        ("forward", 1),
        ("backward", 0),
        ("update", 1),
        ("update:exit", 1),
        ("log", 0),
        ("report", 0),
    ],
)
def test_an_exception_on_one_rank_ends_all(folder, phase, rank):
    log = f"failed-{phase.replace(':', '-')}.h5"
    arguments = ["train", "small.toml", "scheme=chimera", "depth=2", f"log={log}"]
    command = [sys.executable, str(ROOT / "tests" / "fail_at.py"), phase, str(rank), *arguments]
    done = launch.run(2, command, timeout_s=60, cwd=folder)
    assert done.returncode not in (0, 124), done.stderr
    assert f"rank {rank}: {'SystemExit: 0' if 'exit' in phase else 'RuntimeError: a fault put in'}" in done.stderr
    if phase in ("forward", "backward", "update"):
        assert f"step 0, worker {rank}, stage" in done.stderr and "op " in done.stderr
    if phase in ("forward", "log"):
        assert read_run(folder / log).config["depth"] == 2


@pytest.mark.parametrize(
    "options",
    [
        ("scheme=chimera_zb", "tied=true", "dropout=0.1", "recompute=layer"),
        ("scheme=chimera", "model=bert", "tied=true", "vocabulary=50", "sequence_length=32", "positions=32"),
        ("scheme=zb_v", "model=my_model:build"),
    ],
    ids=["gpt", "bert", "user"],
)
def test_the_doctor_finds_training_equal_to_one_process(folder, options):
    (folder / "my_model.py").write_text(USER_MODEL)
    done = launch.chimera(2, "doctor", "--parity", "depth=2", "micro_batches=4", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    assert len(done.stdout.splitlines()) == 3 + 4  # devices, head, the two copies of each stage, verdict


USER_MODEL = """
import torch
from torch import nn


class Join(nn.Module):
    def forward(self, x, kept):
        return x * kept.unsqueeze(-1), kept


class Keep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)

    def forward(self, ids):
        return self.embedding(ids), ids % 3 > 0


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 257)
        self.linear.bias.requires_grad_(False)

    def forward(self, x, kept):
        return self.linear(torch.tanh(x)) * kept.unsqueeze(-1)


def build():
    return [Keep(), Join(), Join(), Last()]
"""


def test_a_measured_partition_shares_out_seconds():
    job = plan_job(load("gpt-tiny", ["scheme=chimera", "depth=2", "partition=measured"]), 2)
    seconds = [1.0] * len(job.task.model.layers)
    seconds[-1] = 3.0
    measured = job.cut_by(seconds)
    # Chimera's workers hold both stages: whatever the cut, they have the same to do.
    assert measured.imbalance == 1 and measured.balanced == "seconds"
    job = plan_job(load("gpt-tiny", ["scheme=1f1b", "depth=2", "partition=measured"]), 2)
    assert [len(cut) for cut in job.cut_by(seconds).cuts] == [6, 4]


def test_the_order_for_what_stages_cost_is_the_plan_of_the_job():
    costly_head = ["scheme=zb_v", "depth=2", "micro_batches=4", "vocabulary=8192"]
    drawn = plan_job(load("gpt-tiny", costly_head), 2)
    best = plan_job(load("gpt-tiny", [*costly_head, "order=costs"]), 2)
    costs = by_thirds(best.costs)
    assert simulate(best.plan.schedule, costs).makespan_s < simulate(drawn.plan.schedule, costs).makespan_s
    seconds = [1.0] * len(best.task.model.layers)
    assert (
        best.cut_by(seconds).plan.schedule == schedule_of(best.config, by_thirds(best.cut_by(seconds).costs)).schedule
    )


def test_accumulation_multiplies_the_mini_batch():
    job = plan_job(load("gpt-tiny", ["scheme=chimera", "depth=2", "micro_batches=4", "accumulate=3"]), 4)
    assert len(job.sizes) == 2 * 4 * 3 and job.plan.schedule.updates == 1
    with pytest.raises(InputError, match=r"pipedream has no flush.*micro_batches=12"):
        plan_job(load("gpt-tiny", ["scheme=pipedream", "depth=2", "micro_batches=4", "accumulate=3"]), 2)
