"""`chimera-mpi plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from chimera_mpi.cli import main
from chimera_mpi.config import load, schedule_of
from chimera_mpi.predict.machine import machine_text, read_machine, write_machine
from chimera_mpi.schedule import STREAMS

PLAN = ["plan", "gpt-tiny", "--machine", "piz-daint", "--schemes", "1f1b,chimera,zb_h1"]
FOUR = [*PLAN, "--workers", "4", "--mini-batch", "16"]
STREAM = [*FOUR, "--schemes", "pipedream_2bw", "--asynchronous", "--depths", "4"]


def test_plan_says_what_is_best_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FOUR) == 0
    out, err = capsys.readouterr()
    assert "gpt-tiny on 4 workers of piz-daint, 16 samples of 64 tokens a step" in out
    assert "where the seconds of a step go" in out and "2 takes " in out
    assert "simulation and Eq. 1 differ by" in out
    assert not err and "\x1b" not in out


def test_one_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--workers", "1", "--mini-batch", "1"]) == 0
    assert "gpt-tiny on 1 worker of piz-daint, 1 sample of 64 tokens a step" in capsys.readouterr().out


def test_json_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FOUR, "--json", "--best", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 3
    steps = [row["step_s"] for row in found["best"]]
    assert steps == sorted(steps)
    for row in [*found["best"], found["best_1f1b"]]:
        assert row["depth"] * row["width"] == 4
        assert row["samples_per_s"] == pytest.approx(16 / row["step_s"])
        assert sum(row["seconds"].values()) == pytest.approx(row["step_s"])
        assert 0 < row["memory_bytes"] <= found["memory_bytes"]


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("gpt-tiny", ["--workers", "4", "--mini-batch", "16"]),
        ("gpt-tiny", ["--workers", "7", "--mini-batch", "13", "log=none", "precision=bf16"]),
        ("bert-tiny", ["--workers", "6", "--mini-batch", "17", "tied=false", "--asynchronous"]),
        ("gpt-tiny", ["--workers", "4", "--mini-batch", "32", "--asynchronous", "scheme=pipedream_2bw", "depth=4"]),
        (
            "gpt-tiny",
            ["--workers", "4", "--mini-batch", "8", "--depths", "4", "optimizer_sharding=replicas", "receives_ahead=1"],
        ),
    ],
)
def test_train_takes_what_plan_writes(source: str, more: list[str], tmp_path: Path, capsys) -> None:
    from chimera_mpi.prediction import predict
    from chimera_mpi.train import plan_job

    path = tmp_path / "plan.toml"
    assert main(["plan", source, "--machine", "small-box", *more, "-o", str(path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    workers, mini_batch = (int(more[more.index(option) + 1]) for option in ("--workers", "--mini-batch"))
    config = load(str(path))
    job = plan_job(config, workers)
    assert (config.scheme, config.depth, job.width) == (best["scheme"], best["depth"], best["width"])
    assert sum(job.sizes) == mini_batch and max(job.sizes) == best["micro_batch_size"]
    assert schedule_of(config).micro_batches == best["micro_batches"]
    partition = best["partition"]
    assert partition == "uniform" or [cut.start for cut in job.cuts[1:]] == partition
    if best["scheme"] not in STREAMS:  # of which a job does many steps, and not all are alike
        found = predict(job, "cpu", read_machine("small-box"))
        assert found.step_s == pytest.approx(best["step_s"])
        assert max(of.total_bytes for of in found.memory) == pytest.approx(best["memory_bytes"])
    kept = load(source, [word for word in more if "=" in word]).model_dump()
    assert all(
        getattr(config, key) == kept[key] for key in ("layers", "precision", "optimizer", "learning_rate", "tied")
    )


def test_streams_are_chosen_when_they_may_be_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt-tiny", "--machine", "piz-daint", "--workers", "4", "--mini-batch", "64", "--depths", "4"]
    main([*asked, "--json"])
    assert not {row["scheme"] for row in json.loads(capsys.readouterr().out)["best"]} & set(STREAMS)
    main([*asked, "--schemes", "1f1b,pipedream_2bw", "--asynchronous"])
    out = capsys.readouterr().out
    assert "pipedream_2bw*" in out and "* asynchronous" in out
    main([*asked, "tied=true", "--schemes", "1f1b,pipedream_2bw", "--asynchronous"])
    assert (
        "left out: pipedream_2bw holds its stages at several versions, tied weights at one" in capsys.readouterr().out
    )


def test_scaling_is_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "scaling.svg"
    scale = [*PLAN, "--workers", "8,64,131072", "--mini-batch", "16"]
    assert main([*scale, "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "weak scaling" in out and "262144" in out and "●" in out
    ET.fromstring(picture.read_text(encoding="utf-8"))
    assert main([*scale, "--strong", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["workers"] for row in rows] == [8, 64, 131072]
    assert rows[1]["mini_batch"] == 16 and "without a sample" in rows[2]["refused"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PLAN, "--workers", "0", "--mini-batch", "8"], "must be a whole number of 1 or more, not '0'"),
        ([*PLAN, "--workers", "4"], "give --mini-batch"),
        ([*FOUR, "--machine", "piz-dain"], "did you mean 'piz-daint'?"),
        ([*FOUR, "--schemes", "chimaera"], "unknown scheme 'chimaera': did you mean 'chimera'?"),
        ([*FOUR, "--schemes", "pipedream"], "pipedream is asynchronous"),
        ([*FOUR, "pairs=2"], "pairs is what plan chooses"),
        ([*FOUR, "layer=2"], "unknown key 'layer'"),
        ([*FOUR, "--svg", "a.svg"], "give --workers several numbers"),
        ([*PLAN, "--workers", "512", "--mini-batch", "8"], "leaves some of 512 workers without a sample"),
        ([*FOUR, "--depths", "3"], "try one of [1, 2, 4]"),
        (["plan", "gpt-large", *FOUR[2:]], "neither a preset nor a file"),
        ([*FOUR, "micro_batch_size=100"], "a mini-batch of 16 on 4 workers into micro-batches of 100: try 16\n"),
        ([*FOUR, "micro_batch_size=5", "--depths", "2"], "into micro-batches of 5: try 4 or 8\n"),
        (
            [*FOUR, "--mini-batch", "7", "--max-micro-batch-size", "1", "--depths", "1"],
            "have at least 2 samples, not 1",
        ),
        ([*FOUR, "--schemes", "chimera", "--depths", "1"], "(chimera needs an even depth, not 1): try depth 2 or 4\n"),
        ([*FOUR, "--schemes", "chimera", "--workers", "3"], "even depth, not 3): try 2 or 4 workers\n"),
        ([*PLAN, "--workers", "4", "--mini-batch", "9" * 400], "must be 1,000,000,000,000,000 or less"),
        ([*FOUR, "scheme=gpipe"], "scheme= is given, and --schemes as well"),
        ([*FOUR, "--depths", "4", "depth=2"], "depth= is given, and --depths as well"),
        ([*FOUR, "mini_batch_size=32"], "mini_batch_size= is given, and --mini-batch as well"),
        ([*FOUR, "--max-micro-batch-size", "3", "micro_batch_size=5"], "and --max-micro-batch-size as well"),
        ([*STREAM, "micro_batch_size=8"], "pipedream_2bw of depth 4 needs as many micro-batches"),
        ([*STREAM, "tied=true"], "tied weights at one: set tied=false): try depth 1\n"),
        (
            [*FOUR, "--mini-batch", "90000000", "micro_batch_size=1"],
            "try larger micro-batches or a smaller mini-batch\n",
        ),
    ],
)
def test_refusals_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_what_nothing_fits_into_is_refused_and_writes_nothing(tmp_path: Path, capsys) -> None:
    from dataclasses import replace

    small, path = tmp_path / "small.toml", tmp_path / "plan.toml"
    write_machine(replace(read_machine("piz-daint"), memory_bytes=1e6), small)
    assert main([*FOUR, "--machine", str(small), "-o", str(path)]) == 2
    err = capsys.readouterr().err
    assert "need at least" in err and "and it has 1 MB" in err and err.count("\n") == 1
    assert not path.exists()


def test_a_name_writes_no_keys(tmp_path: Path, capsys) -> None:
    box, source, path = tmp_path / "box.toml", tmp_path / "tiny\nsteps = 6 # b.toml", tmp_path / "plan.toml"
    box.write_text(
        machine_text(read_machine("small-box")).replace('name = "small-box"', r'name = "a\nsteps = 5 # b\r"')
    )
    source.write_text("layers = 2\nvocabulary = 259\n")
    words = ["plan", str(source), "--machine", str(box), "--workers", "2", "--mini-batch", "4", "--json"]
    assert main([*words, "-o", str(path)]) == 0
    assert load(str(path)).steps == 100 and path.read_text().startswith("# Planned from tiny steps = 6 # b for 2")


def test_neither_torch_nor_mpi_is_imported() -> None:
    run = f"import sys; from chimera_mpi.cli import main; main({FOUR!r}); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "mpi4py", "h5py", "numpy"} & set(out.splitlines()[-1].split())
