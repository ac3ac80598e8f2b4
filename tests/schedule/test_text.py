"""The text form: there and back, what it forgives and what not, and the exchange with torch."""

import pytest

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.schedule import SCHEMES, ScheduleError, build, dumps, loads, messages, read


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(scheme):
    for depth, n in (2, 3), (4, 8):
        schedule = build(scheme, depth, n)
        assert loads(dumps(schedule), scheme) == schedule


def test_the_text_itself():
    assert dumps(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert dumps(build("chimera", 2, 2)) == "0F0,1F1@1,1B1@1,0B0\n0F1@1,1F0,1B0,0B1@1\n"
    assert dumps(build("pipedream", 1, 1)) == "0F0,0B0\n"
    assert dumps(build("pipedream", 1, 2)) == "0F0,0B0,0R0,0U0,0F1,0B1,0R1,0U1\n"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
        "\n\n 0F0 ,0F1,, 0B0,0B1,\n,,,\n\t1F0, 1B0,1F1,1B1,,\n\n",
        '"0F0","0F1","0B0","0B1"\n"1F0","1B0","1F1","1B1"',
        "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,(1F1;1B1)OVERLAP_F_B,1REDUCE_GRAD",
    ],
)
def test_what_does_not_matter(text):
    assert loads(text, "1f1b") == build("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no op in it"),
        ("\n,,\n", "there is no op in it"),
        ("0R0,0U0\n1R0,1U0", "there is no micro-batch in it"),
        ("0F0,0X0,0B0", "line 1, cell 2: '0X0' is no op"),
        ("0F0,\x1b[31m0B0", r"line 1, cell 2: '\\x1b\[31m0B0' is no op"),
        ("0F0,0f1,0B0", "line 1, cell 2: '0f1' is no op"),
        ("0F0,0B0\n\n1F0,1B0,F0", "line 3, cell 3: 'F0' is no op"),
        ("0F0,0B0,0B0", "line 1, cell 3: 0B0 is there twice, first in cell 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "line 2: 1B1 is missing"),
        ("0F0,0F2,0B0,0B2", "line 1: 0F1 is missing"),
        ("0F0,0I0", "line 1: 0W0 is missing"),
        ("0F0,0B0\n2F0,2B0", "no line has stage 1"),
        ("0F0@1,0B0@1", "no line has stage 0"),
        ("0F0,1F0\n1B0,0B0", "line 2, cell 1: 1B0, but line 1 holds that stage: it has 1F0"),
        ("0F999999999,0B999999999", "line 1: 0F0 is missing"),
        ("0F9999999999,0B0", "line 1, cell 1: '0F9999999999' is no op"),
    ],
)
def test_what_is_refused_in_one_line(text, words):
    with pytest.raises(InputError, match=words) as raised:
        loads(text)
    assert "\n" not in str(raised.value)


def test_an_order_that_cannot_be_carried_out_is_refused():
    with pytest.raises(ScheduleError, match="worker 0 does 0B0 before 0F0, which it needs"):
        loads("0B0,0F0")
    with pytest.raises(ScheduleError, match="deadlock"):
        loads("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0")


def test_updates_that_are_there_are_by_no_sync():
    with pytest.raises(InputError, match="R and U, are where it has them: leave out sync"):
        loads("0F0,0B0,0R0,0U0", sync="lazy")
    assert loads("0F0,0B0,0R0,0U0") == loads("0F0,0B0", sync="lazy")


def test_files(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(dumps(build("zb_v", 2, 3)), encoding="utf-8-sig")
    assert read(path).orders == build("zb_v", 2, 3).orders
    with pytest.raises(InputError, match=r"none\.csv cannot be read"):
        read(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"mine\.csv cannot be read \(it is no text\): give a CSV file"):
        read(path)
    path.write_text("0F0,0B")
    with pytest.raises(InputError, match=r"mine\.csv: line 1, cell 2: '0B' is no op"):
        read(path)


class _Stage:
    """As much of a stage as torch needs to make a schedule."""

    def __init__(self, index, stages, rank, workers):
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, rank, workers
        self.is_first, self.is_last, self.has_backward, self.submod = index == 0, index == stages - 1, True, None
        self.stage_index_to_group_rank = {}


def torchs(name, workers, chunks, n):
    """A schedule of torch's, as if on rank 0, and the module it is from."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    vee = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = (0, 2 * workers - 1) if vee else range(0, workers * chunks, workers)
    stages = [_Stage(index, workers * chunks, 0, workers) for index in mine]
    made = getattr(torch_schedules, name)
    single = issubclass(made, torch_schedules.PipelineScheduleSingle)
    return made(stages[0] if single else stages, n, loss_fn=lambda *_: None)


TORCH = [
    ("ScheduleInterleaved1F1B", 4, 1, 8),
    ("ScheduleInterleaved1F1B", 4, 2, 8),
    ("ScheduleInterleavedZeroBubble", 4, 2, 8),
    ("ScheduleZBVZeroBubble", 4, 2, 8),
    ("ScheduleDualPipeV", 4, 2, 8),
]


TWINS = {"ScheduleInterleaved1F1B": "interleaved", "ScheduleInterleavedZeroBubble": "interleaved_zb"}


@pytest.mark.parametrize(("name", "workers", "chunks", "n"), TORCH)
def test_what_torch_dumps_loads_here(name, workers, chunks, n, tmp_path):
    path = tmp_path / "torch.csv"
    torchs(name, workers, chunks, n)._dump_csv(path, format="compute_only")
    schedule = read(path)
    assert (schedule.depth, schedule.stages, schedule.micro_batches) == (workers, workers * chunks, n)
    if scheme := TWINS.get(name):
        assert schedule.orders == build(scheme, workers, n, chunks=chunks).orders
    assert simulate(schedule, Costs(1, 2)).makespan_s >= 3 * n * chunks


@pytest.mark.parametrize(("name", "scheme"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_torchs_schedules_of_one_stage(name, scheme):
    """They have an order, but no way to dump it; torch 2.13 counts the last rank's forwards of 1F1B from 1."""
    rows = torchs(name, 4, 1, 8)._get_pipeline_order().values()
    texts = [",".join(str(action or "") for action in row) + "\n" for row in rows]
    ours = build(scheme, 4, 8)
    if "3F0" in texts[3]:
        assert loads("".join(texts)).orders == ours.orders
    else:
        with pytest.raises(InputError, match="line 4: 3F0 is missing"):
            loads("".join(texts))
    mended = "".join([*texts[:3], dumps(ours).splitlines()[3]])
    assert loads(mended).orders == ours.orders


@pytest.mark.parametrize(
    "scheme", [s for s in SCHEMES if len(build(s, 4, 8).pipes) == 1 and build(s, 4, 8).updates == 1]
)
def test_ours_load_in_torch(scheme, tmp_path):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = build(scheme, 4, 8)
    path = tmp_path / "ours.csv"
    path.write_text(dumps(schedule))
    mine = [stage for _, stage in schedule.places(0)]
    stages = [_Stage(index, schedule.stages, 0, 4) for index in mine]
    theirs = torch_schedules._PipelineScheduleRuntime(stages, 8, loss_fn=lambda *_: None)
    theirs._load_csv(str(path))
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.pipes[0]))
    assert [str(action) for action in theirs.pipeline_order[1]] == dumps(schedule).splitlines()[1].split(",")
    sent = sum("SEND" in str(action) for order in theirs.pipeline_order_with_comms.values() for action in order)
    assert sent == sum(message.source != message.target for message in messages(schedule))


@pytest.mark.parametrize("scheme", ["chimera", "gems", "chimera_zb", "dualpipe"])
def test_a_pipeline_without_micro_batches_is_kept(scheme):
    schedule = build(scheme, 4, 1)
    again = loads(dumps(schedule))
    assert (again.pipes, again.orders) == (schedule.pipes, schedule.orders)
