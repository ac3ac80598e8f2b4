"""Which depths are advised where one does not fit."""

import pickle

import pytest

from chimera_mpi.errors import InputError
from chimera_mpi.schedule import SCHEMES, ScheduleError, UnfitDepth, build, dumps, fit_depth, loads, read
from chimera_mpi.schedule.depths import TRIED, width_of


def of(scheme):
    def make(depth, ranks):
        return width_of(ranks, depth), build(scheme, depth, 4)

    return make


@pytest.mark.parametrize(
    ("scheme", "depth", "ranks", "spares", "message"),
    [
        ("chimera", 3, 4, 0, "depth 3 does not divide the 4 MPI ranks: try depth = 2, 4"),
        ("1f1b", 3, 4, 0, "depth 3 does not divide the 4 MPI ranks: try depth = 1, 2, 4"),
        ("chimera", 2, 3, 0, "no depth fits 3 ranks, start 2 or 4 ranks"),
        ("chimera", 2, 4, 1, "no depth fits 3 ranks beside spares=1, start 3 or 5 ranks"),
        ("chimera", 3, 3, 0, "chimera needs an even depth, not 3: with all else as asked no depth fits 3 ranks, start"),
        ("1f1b", 2, 2, 2, "spares=2 leaves none of 2 ranks"),
    ],
)
def test_what_is_advised_would_be_taken(scheme, depth, ranks, spares, message):
    with pytest.raises(InputError) as refused:
        fit_depth(depth, ranks, spares, of(scheme))
    assert message in str(refused.value)


def test_where_nothing_fits_another_scheme_is_advised():
    def never(depth, ranks):
        raise UnfitDepth(f"depth {depth} is not to be had", "there is none")

    with pytest.raises(InputError, match="take another scheme"):
        fit_depth(2, 4, 0, never)


def test_of_many_ranks_only_the_nearest_depths_are_tried():
    tried = []

    def make(depth, ranks):
        tried.append(depth)
        width_of(ranks, depth)

    with pytest.raises(InputError, match="try depth = 4, 8, 16, 32, 64, 128"):
        fit_depth(24, 4096, 0, make)
    assert len(tried) <= 1 + TRIED


def test_a_refusal_keeps_its_words_on_its_way():
    refusal = UnfitDepth("chimera needs an even depth, not 3", "try depth=4")
    assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal)


def test_a_file_of_an_odd_depth_is_refused_by_name(tmp_path):
    path = tmp_path / "three.csv"
    path.write_text(dumps(build("1f1b", 3, 2)))
    with pytest.raises(ScheduleError, match=r"three\.csv: chimera needs an even depth, not 3"):
        read(path, "chimera")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_of_a_scheme_passes_as_that_scheme(scheme):
    schedule = build(scheme, 4, 8)
    assert loads(dumps(schedule), scheme).pipes == schedule.pipes
