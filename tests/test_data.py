"""Token files are whole or refused; every sample comes once an epoch, in an order that the seed alone decides."""

import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import h5py
import numpy as np
import pytest

from chimera_mpi.data import (
    END_OF_DOCUMENT,
    IGNORED,
    PARTS,
    VOCABULARY,
    Batches,
    MaskedBatches,
    Rules,
    even_sizes,
    open_corpus,
    preparation,
    prepare,
    special_tokens,
    unigram_entropy,
)
from chimera_mpi.data.batches import _shuffled
from chimera_mpi.errors import InputError, unwritable

TEXT = Path(__file__).parent.parent / "data" / "pipelines.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirty documents, one of them not UTF-8, one empty, one twice, one of another kind."""
    root = tmp_path_factory.mktemp("sources") / "texts"
    (root / "inner").mkdir(parents=True)
    text = TEXT.read_bytes()
    for number in range(30):
        place = root / "inner" if number % 3 else root
        (place / f"{number:02}.txt").write_bytes(b"%d\n" % number + text[100 * number : 300 + 107 * number])
    (root / "broken.txt").write_bytes(bytes(range(256)) + b"\xff\xfe\xc3")
    (root / "empty.txt").touch()
    (root / "twice.txt").write_bytes((root / "00.txt").read_bytes())
    (root / "picture.bin").write_bytes(b"\x00" * 1000)
    return root


@pytest.fixture(scope="module")
def token_file(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("corpus") / "tokens.h5"
    prepare(output, [folder], Rules(seed=3))
    return output


def documents_of(path, part):
    with h5py.File(path) as file:
        tokens, starts = file[part]["tokens"][:], file[part]["documents"][:]
        names = [name.decode() for name in file[part]["names"]]
    return dict(zip(names, np.split(tokens, starts[1:]), strict=True))


# ---- prepare -----------------------------------------------------------------------------------------------------


def test_each_document_is_there_once_byte_for_byte(folder, token_file):
    documents = documents_of(token_file, "train") | documents_of(token_file, "validation")
    expected = {f"texts/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.txt")}
    expected["texts/broken.txt"] = expected["texts/broken.txt"].decode(errors="replace").encode()
    del expected["texts/empty.txt"], expected["texts/twice.txt"]
    assert documents.keys() == expected.keys()
    for name, tokens in documents.items():
        assert tokens[-1] == END_OF_DOCUMENT
        assert bytes(tokens[:-1].astype(np.uint8)) == expected[name]
        assert END_OF_DOCUMENT not in tokens[:-1]


def test_no_document_is_in_both_parts_and_the_fraction_holds(token_file):
    train, validation = (documents_of(token_file, part) for part in PARTS)
    assert not train.keys() & validation.keys()
    sizes = [sum(map(len, part.values())) for part in (train, validation)]
    assert 0.05 < sizes[1] / sum(sizes) <= 0.1


def test_the_same_input_gives_the_same_file(folder, token_file, tmp_path):
    moved = tmp_path / "elsewhere" / "texts"
    shutil.copytree(folder, moved)
    for path in moved.rglob("*.txt"):
        os.utime(path, (1, 1))
    again = tmp_path / "again.h5"
    prepare(again, [moved], Rules(seed=3))
    assert again.read_bytes() == token_file.read_bytes()
    prepare(tmp_path / "other.h5", [folder], Rules(seed=4))
    assert documents_of(tmp_path / "other.h5", "validation").keys() != documents_of(token_file, "validation").keys()


def test_the_attributes_say_what_is_in_the_file(folder, token_file):
    with h5py.File(token_file) as file:
        assert (file.attrs["schema"], file.attrs["vocabulary"], file.attrs["seed"]) == (1, 257, 3)
        assert '"sources": ["texts"]' in file.attrs["provenance"].decode()
        for part in PARTS:
            group = file[part]
            tokens = group["tokens"][:]
            counts = np.bincount(tokens, minlength=VOCABULARY)
            assert group.attrs["tokens"] == len(tokens)
            assert (group["counts"][:] == counts).all()
            assert group.attrs["unigram_entropy_nats"] == pytest.approx(unigram_entropy(counts), rel=1e-12)
        everything = file["train/counts"][:] + file["validation/counts"][:]
        assert file.attrs["unigram_entropy_nats"] == pytest.approx(unigram_entropy(everything), rel=1e-12)


def test_a_text_alone_is_cut_in_two(tmp_path):
    prepared = prepare(tmp_path / "one.h5", [TEXT])
    parts = [documents_of(prepared.path, part) for part in PARTS]
    assert [len(part) for part in parts] == [1, 1]
    joined = b"".join(bytes(tokens[:-1].astype(np.uint8)) for part in parts for tokens in part.values())
    assert joined == TEXT.read_bytes()
    assert (prepared.documents, prepared.train_tokens + prepared.validation_tokens) == (2, len(joined) + 2)


def test_without_a_validation_part(folder, tmp_path):
    prepared = prepare(tmp_path / "all.h5", [folder], Rules(validation_fraction=0))
    assert prepared.validation_tokens == 0
    assert open_corpus(prepared.path, "train", 16).samples > 100
    assert open_corpus(prepared.path, "validation", 16, least=0).samples == 0
    remedies = "set eval_every=none, or prepare it with a larger --validation-fraction"
    with pytest.raises(InputError, match=f"0 validation tokens, a sample of sequence_length=16 needs 17: {remedies}$"):
        open_corpus(prepared.path, "validation", 16)
    with pytest.raises(InputError, match=f"0 validation tokens, pairs of sequence_length=16 need 27: {remedies}$"):
        MaskedBatches(open_corpus(prepared.path, "validation", 16, least=0), (2,))


def test_two_large_documents_make_one_of_each_part(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 1000)
    prepared = prepare(tmp_path / "two.h5", [tmp_path])
    assert (prepared.train_tokens, prepared.validation_tokens) == (1001, 1001)


def test_python_itself_is_a_corpus_of_several_megabytes(tmp_path):
    start = time.perf_counter()
    prepared = prepare(tmp_path / "python.h5")
    assert time.perf_counter() - start < 30
    assert 3e6 < prepared.train_tokens < 5e7
    assert 0.08 < prepared.validation_tokens / prepared.train_tokens < 0.12
    assert 2.8 < open_corpus(prepared.path, "validation").unigram_entropy_nats < 3.6
    names = documents_of(prepared.path, "train").keys() | documents_of(prepared.path, "validation").keys()
    assert {"ast.py", "json/decoder.py", "pydoc_data/topics/assert"} <= names
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"seed": -1}, "seed=-1 is not in"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not in"),
        ({"validation_fraction": -0.5}, "validation_fraction=-0.5"),
        ({"suffixes": [".tex"]}, "no text in .*texts.*\\.tex"),
    ],
)
def test_prepare_refuses_and_leaves_nothing(folder, tmp_path, rules, message):
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "x.h5", [folder], Rules(**rules))
    assert not list(tmp_path.iterdir())


def test_prepare_refuses_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="/no/such is neither"):
        prepare(tmp_path / "x.h5", [Path("/no/such")])
    assert not list(tmp_path.iterdir())


def test_prepare_never_overwrites(token_file, folder):
    before = token_file.read_bytes()
    with pytest.raises(InputError, match="exists and stays"):
        prepare(token_file, [folder])
    assert token_file.read_bytes() == before
    with pytest.raises(InputError, match="is not a folder"):
        prepare(token_file.parent / "none" / "x.h5", [folder])


def test_a_prepare_that_fails_half_way_leaves_nothing(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation, "_write_names", full)
    with pytest.raises(InputError, match="No space left"):
        prepare(tmp_path / "x.h5", [folder])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", [100, 8000])
def test_a_full_disk_is_told_in_a_line(tmp_path, missing):
    """Also where HDF5 would find out as it closes the file, upon which it crashes when its process ends."""
    (tmp_path / "texts").mkdir()
    for index in range(40):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"{index}" * 500)
    size = prepare(tmp_path / "whole.h5", [tmp_path / "texts"]).path.stat().st_size
    limited = (
        "import resource, sys\n"
        "from chimera_mpi.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size - missing}, {size - missing}))\n"
        "sys.exit(main(['data', 'prepare', '-o', 'x.h5', 'texts']))\n"
    )
    command = [sys.executable, "-B", "-c", limited]  # no module is to be cached in part
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("chimera-mpi: cannot write x.h5 (File too large): ") and done.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["texts", "whole.h5"]


def test_what_hdf5_says_of_a_disk_is_one_line():
    told = str(unwritable("x.h5", OSError("file write failed: time = now\n, errno = 28, " + 100 * "more ")))
    assert told.startswith("cannot write x.h5 (file write failed: time = now , errno = 28, more more")
    assert len(told) < 250 and "\n" not in told


# ---- open_corpus -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_length", [1, 7, 64])
def test_samples_follow_each_other_and_targets_are_one_ahead(token_file, sequence_length):
    corpus = open_corpus(token_file, "train", sequence_length)
    inputs, targets = corpus.sample(range(corpus.samples))
    assert inputs.shape == targets.shape == (corpus.samples, sequence_length)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    with h5py.File(token_file) as file:
        tokens = file["train/tokens"][:]
    used = corpus.samples * sequence_length
    assert (inputs.ravel() == tokens[:used]).all()
    assert (targets.ravel() == tokens[1 : used + 1]).all()
    assert len(tokens) - 1 - used < sequence_length


def test_a_corpus_holds_no_file_open_and_cannot_be_written(token_file):
    corpus = open_corpus(token_file)
    with h5py.File(token_file, "r+"):
        pass
    with pytest.raises(ValueError):
        corpus.tokens[0] = 1


def damaged(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no data file .*chimera-mpi data prepare -o .*x.h5"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_text("step,loss\n1,2.0\n" * 100), "not a whole token file"),
        (lambda path: h5py.File(path, "w").close(), "HDF5 but no token file"),
        (lambda path: h5py.File(path, "w").create_dataset("steps/loss", data=[1.0]).file.close(), "no token file"),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path, make, message):
    make(tmp_path / "x.h5")
    with pytest.raises(InputError, match=message):
        open_corpus(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.attrs.__delitem__("schema"), "no token file"),
        (lambda file: file.attrs.__setitem__("schema", 2), "schema 2, this program reads 1"),
        (lambda file: file.__delitem__("validation"), "no token file"),
        (lambda file: file["train"].attrs.__delitem__("sha256"), "no sha256"),
        (lambda file: file["train"].attrs.__delitem__("unigram_entropy_nats"), "not a whole token file"),
        (lambda file: file["train/tokens"].__setitem__(5, 7), "damaged: the train tokens"),
        (lambda file: file.attrs.__setitem__("remark", "more attributes do no harm"), None),
    ],
)
def test_a_token_file_that_was_tampered_with_is_refused(token_file, tmp_path, change, message):
    path = tmp_path / "x.h5"
    shutil.copy(token_file, path)
    damaged(path, change)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        open_corpus(path)


def test_chunked_tokens_are_refused_with_a_way_out(token_file, tmp_path):
    def chunk(file):
        tokens = file["train/tokens"][:]
        del file["train/tokens"]
        file.create_dataset("train/tokens", data=tokens, chunks=(64,), compression="gzip")

    shutil.copy(token_file, tmp_path / "x.h5")
    damaged(tmp_path / "x.h5", chunk)
    with pytest.raises(InputError, match="h5repack -l CONTI"):
        open_corpus(tmp_path / "x.h5")


def test_a_truncated_file_is_refused_wherever_it_ends(token_file, tmp_path):
    whole = token_file.read_bytes()
    path = tmp_path / "x.h5"
    for size in sorted({*range(1, 100, 7), *range(100, len(whole), len(whole) // 150), len(whole) - 1}):
        path.write_bytes(whole[:size])
        for part in PARTS:
            with pytest.raises(InputError, match=r"x\.h5"):
                open_corpus(path, part, 16)


def test_no_damage_brings_more_than_one_line(token_file, tmp_path):
    """Zeros written anywhere are refused in one line, or did no harm to the tokens."""
    whole = token_file.read_bytes()
    path = tmp_path / "x.h5"
    expected = open_corpus(token_file, "train", 16).tokens
    for start in range(0, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:start] + bytes(64) + whole[start + 64 :])
        try:
            assert (open_corpus(path, "train", 16).tokens == expected).all()
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("part", "sequence_length", "message"),
    [
        ("test", 8, "no part 'test': try train or validation"),
        ("train", 0, "sequence_length=0"),
        ("train", 10**6, "tokens, a sample of sequence_length=1000000 needs 1000001"),
    ],
)
def test_what_cannot_be_sampled_is_refused(token_file, part, sequence_length, message):
    with pytest.raises(InputError, match=message):
        open_corpus(token_file, part, sequence_length)


# ---- Batches -----------------------------------------------------------------------------------------------------


def epochs_of(batches, epochs):
    """The sample ids of the first `epochs` epochs, in the order in which they are used."""

    def ids():
        step = 0
        while True:
            for index in range(len(batches.sizes)):
                yield from batches.sample_ids(step, index).tolist()
            step += 1

    samples = batches.corpus.samples
    return [list(islice(stream, samples)) for stream in [ids()] for _ in range(epochs)]


@pytest.mark.parametrize("sizes", [(1,), (4, 4, 4, 4), (3, 2, 2), (1, 5), (50, 49), (700, 1)])
@pytest.mark.parametrize("seed", [0, 1, None])
def test_every_sample_comes_once_an_epoch(token_file, sizes, seed):
    corpus = open_corpus(token_file, "train", 100)
    epochs = epochs_of(Batches(corpus, sizes, seed), 3)
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(corpus.samples))
    if seed is None:
        assert epochs == [epochs[0]] * 3
    else:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_samples_do_not_depend_on_how_a_step_is_cut(token_file):
    corpus = open_corpus(token_file, "train", 32)
    whole = epochs_of(Batches(corpus, (24,), 5), 2)
    assert all(epochs_of(Batches(corpus, even_sizes(24, n), 5), 2) == whole for n in (2, 3, 5, 7, 24))


def test_any_rank_reads_the_same_in_any_order(token_file):
    here = Batches(open_corpus(token_file, "train", 32), (3, 2, 2), 5)
    there = Batches(open_corpus(token_file, "train", 32), (3, 2, 2), 5)
    wanted = {(step, index): here.micro_batch(step, index) for step in range(20) for index in range(3)}
    _shuffled.cache_clear()
    for (step, index), (inputs, targets) in reversed(wanted.items()):
        found = there.micro_batch(step, index)
        assert (found[0] == inputs).all() and (found[1] == targets).all()
        assert inputs.shape == targets.shape == ((3, 2, 2)[index], 32)
        assert (inputs == here.corpus.sample(here.sample_ids(step, index))[0]).all()


def test_an_evaluation_of_some_samples_sees_the_whole_part(token_file):
    corpus = open_corpus(token_file, "train", 16)
    ids = Batches(corpus, (20,), seed=None).sample_ids(0, 0)
    assert np.histogram(ids, bins=4, range=(0, corpus.samples))[0].min() > 0


def test_seeds_give_different_orders(token_file):
    corpus = open_corpus(token_file, "train", 32)
    orders = [tuple(epochs_of(Batches(corpus, (8,), seed), 1)[0]) for seed in range(5)]
    assert len(set(orders)) == 5


def test_a_far_step_costs_no_more_than_the_first(token_file):
    batches = Batches(open_corpus(token_file, "train", 32), (8, 8), 0)
    assert batches.micro_batch(10**9, 1)[0].shape == (8, 32)


@pytest.mark.parametrize(
    ("sizes", "seed", "message"), [((), 0, r"\[\]"), ((4, 0), 0, r"\[4, 0\]"), ((4,), -1, "seed=-1")]
)
def test_impossible_batches_are_refused(token_file, sizes, seed, message):
    with pytest.raises(InputError, match=message):
        Batches(open_corpus(token_file), sizes, seed)


def test_sizes_are_even():
    assert even_sizes(7, 3) == (3, 2, 2)
    assert even_sizes(8, 4) == (2, 2, 2, 2)
    for mini_batch in range(1, 30):
        for parts in range(1, mini_batch + 1):
            sizes = even_sizes(mini_batch, parts)
            assert (sum(sizes), len(sizes)) == (mini_batch, parts)
            assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
    with pytest.raises(InputError, match="3 samples does not fill 4 micro-batches"):
        even_sizes(3, 4)
    with pytest.raises(InputError, match="micro_batches=0"):
        even_sizes(3, 0)


# ---- MaskedBatches -----------------------------------------------------------------------------------------------

CLS, SEP, MASK, PAD = special_tokens()


def masked_batches(token_file, sizes=(40,), seed=5, sequence_length=40, **options):
    return MaskedBatches(open_corpus(token_file, "train", sequence_length), sizes, seed, **options)


def pairs_of(batches, step=0, index=0):
    """Of each sample: what was there before the masking, shown ids, segments, mask and whether the second follows."""
    (ids, segments, *mask), (words, strange) = batches.micro_batch(step, index)
    mask = mask[0] if mask else np.ones(ids.shape, dtype=bool)
    return list(zip(np.where(words == IGNORED, ids, words), ids, segments, mask, words, strange, strict=True))


def test_special_tokens_follow_the_bytes(token_file):
    assert (CLS, SEP, MASK, PAD) == (257, 258, 259, 260)
    assert masked_batches(token_file).vocabulary == 261
    assert Batches(open_corpus(token_file), (4,)).vocabulary == 257
    assert special_tokens(1000).cls == 1000


@pytest.mark.parametrize("sequence_length", [5, 6, 10, 40, 64])
@pytest.mark.parametrize("short", [0.0, 0.3, 1.0])
def test_a_sample_is_a_pair(token_file, sequence_length, short):
    """[CLS] first [SEP] second [SEP] [PAD]..., the first from the sample's window and the second from it or another."""
    batches = masked_batches(token_file, (30,), sequence_length=sequence_length, short=short)
    windows, _ = batches.windows.corpus.sample(range(batches.windows.corpus.samples))
    for number, (whole, shown, segments, mask, words, strange) in zip(
        batches.windows.sample_ids(0, 0), pairs_of(batches), strict=True
    ):
        length = mask.sum()
        first_end, second_end = np.flatnonzero(whole == SEP)
        assert whole[0] == CLS and second_end == length - 1 and mask[:length].all()
        assert (whole[length:] == PAD).all() and (shown[length:] == PAD).all()
        assert (segments == ((np.arange(sequence_length) > first_end) & mask)).all()
        first, second = whole[1:first_end], whole[first_end + 1 : second_end]
        content = len(first) + len(second)
        assert len(first) and len(second) and content == length - 3
        assert (whole[[*range(1, first_end), *range(first_end + 1, second_end)]] < VOCABULARY).all()
        assert (windows[number][: len(first)] == first).all()
        sources = np.flatnonzero((windows[:, len(first) : content] == second).all(1))
        assert len(sources) and ((sources != number).any() if strange else number in sources)
        assert (words != IGNORED).sum() == batches.masked == max(1, round(0.15 * sequence_length))
        assert ((shown != whole) <= (words != IGNORED)).all()


def test_shapes_types_and_the_mask(token_file):
    inputs, targets = masked_batches(token_file, (3, 2)).micro_batch(7, 1)
    assert [(a.shape, a.dtype) for a in (*inputs, *targets)] == [((2, 40), np.int64)] * 3 + [((2,), np.int64)]
    inputs, _ = masked_batches(token_file, (3, 2), short=0.1).micro_batch(7, 0)
    assert (inputs[2].shape, inputs[2].dtype) == ((3, 40), bool)
    assert all(array.flags.c_contiguous for array in (*inputs, *targets))


def test_ratios(token_file):
    """80 % [MASK], 10 % anything, 10 % as it was; half of the seconds follow; any token is as likely to be masked."""
    batches = masked_batches(token_file, (500,), short=0.2)
    samples = [sample for step in range(8) for sample in pairs_of(batches, step)]
    whole, shown, _, mask, words, strange = map(np.stack, zip(*samples, strict=True))
    chosen = words != IGNORED
    assert (shown[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    changed = shown[chosen & (shown != MASK) & (shown != whole)]
    assert len(changed) / chosen.sum() == pytest.approx(0.1 * 256 / 257, abs=0.01)
    assert changed.min() <= 5 and changed.max() >= 251 and np.bincount(changed).max() < 40
    assert strange.mean() == pytest.approx(0.5, abs=0.03)
    assert (mask.sum(1) < 40).mean() == pytest.approx(0.2, abs=0.02)
    unpadded = chosen[mask.all(1)]
    assert unpadded[:, 1:-1].mean(0) == pytest.approx(6 / 37, abs=0.04)
    assert np.corrcoef(strange, mask.sum(1))[0, 1] == pytest.approx(0, abs=0.06)


def test_both_ends_of_a_pipeline_read_the_same_in_any_order(token_file):
    here, there = (masked_batches(token_file, (3, 2, 2), short=0.2) for _ in range(2))
    wanted = {(step, index): here.micro_batch(step, index) for step in range(9) for index in range(3)}
    _shuffled.cache_clear()
    np.random.seed(3)
    for place, (inputs, targets) in reversed(wanted.items()):
        found_inputs, found_targets = there.micro_batch(*place)
        for found, expected in zip((*found_inputs, *found_targets), (*inputs, *targets), strict=True):
            assert (found == expected).all()


@pytest.mark.parametrize("seed", [5, None])
def test_masks_do_not_depend_on_how_a_step_is_cut(token_file, seed):
    def joined(parts):
        batches = masked_batches(token_file, even_sizes(24, parts), seed, short=0.2)
        rows = [batches.micro_batch(step, index) for step in range(3) for index in range(parts)]
        return [
            np.concatenate(arrays) for arrays in zip(*((*inputs, *targets) for inputs, targets in rows), strict=True)
        ]

    whole = joined(1)
    for parts in (2, 5, 24):
        assert all((found == wanted).all() for found, wanted in zip(joined(parts), whole, strict=True))


@pytest.mark.parametrize("seed", [0, 1, None])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 2, 2), (50, 49)])
def test_every_window_comes_once_an_epoch_and_no_token_is_left_out(token_file, sizes, seed):
    windows = masked_batches(token_file, sizes, seed).windows
    for epoch in epochs_of(windows, 2):
        assert Counter(epoch) == Counter(range(windows.corpus.samples))
    assert len(windows.corpus.tokens) - 1 - windows.corpus.samples * 37 < 37


def test_each_epoch_and_each_seed_has_masks_of_its_own(token_file):
    batches = masked_batches(token_file, (masked_batches(token_file).windows.corpus.samples,))
    by_window = [
        dict(zip(batches.windows.sample_ids(epoch, 0).tolist(), batches.micro_batch(epoch, 0)[1][0], strict=True))
        for epoch in range(2)
    ]
    same = [((by_window[0][w] != IGNORED) == (by_window[1][w] != IGNORED)).all() for w in by_window[0]]
    assert sum(same) < 3
    firsts = [masked_batches(token_file, seed=seed).micro_batch(0, 0)[1][1].tolist() for seed in (0, 1, 2, None)]
    assert len(set(map(tuple, firsts))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 4}, "sequence_length=4 has no room for a pair"),
        ({"sequence_length": 9000}, r"tokens, pairs of sequence_length=9000 need 17995"),
        ({"short": 1.5}, r"short=1\.5"),
        ({"sizes": (3, 0)}, r"\[3, 0\]"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_pairs_are_refused(token_file, options, message):
    if options.get("sequence_length") == 9000:
        assert 9000 < len(open_corpus(token_file).tokens) < 17995, "the length is of one window and not of two"
    with pytest.raises(InputError, match=message):
        masked_batches(token_file, **options)


# ---- unigram_entropy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "nats"),
    [
        ([5], 0.0),
        ([1, 1], math.log(2)),
        ([0, 3, 0, 3, 3, 3], math.log(4)),
        ([1, 3], math.log(4) - 0.75 * math.log(3)),
        ([10**15, 10**15], math.log(2)),
    ],
)
def test_unigram_entropy(counts, nats):
    assert unigram_entropy(np.array(counts)) == pytest.approx(nats, abs=1e-15)
