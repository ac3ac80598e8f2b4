"""Texts of any kind become the same tokens however they are read, cut and interrupted; what is broken is counted."""

import gzip
import json
import os
import platform
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

from chimera_mpi import data
from chimera_mpi.cli import main
from chimera_mpi.commands import _job
from chimera_mpi.data import (
    BYTES,
    PARTS,
    MaskedBatches,
    Rules,
    corpus,
    open_corpus,
    preparation,
    prepare,
    sources,
    spool,
    tokenizer,
)
from chimera_mpi.data.sources import Broken, Utf8
from chimera_mpi.data.tokenizer import from_json, learn, pieces
from chimera_mpi.errors import InputError

TEXT = Path(__file__).parent.parent / "data" / "pipelines.txt"
WORDS = TEXT.read_text()
END = "<|endoftext|>"


def tokens_of(path):
    """By name, of both parts."""
    found = {}
    with h5py.File(path) as file:
        for part in PARTS:
            names = [name.decode() for name in file[part]["names"]]
            parts = np.split(file[part]["tokens"][:], file[part]["documents"][:][1:])
            found.update(zip(names, parts, strict=True) if names else ())
    return found


def texts_of(path):
    how = open_corpus(path, "train", 1).tokenizer
    by_name = tokens_of(path)
    assert all(ids[-1] == how.end_of_document for ids in by_name.values())
    return {name: "".join(how.decoded([], ids[:-1].tolist())) for name, ids in by_name.items()}


def lines(path, *texts, **more):
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))


@pytest.fixture
def folder(tmp_path):
    """Texts and JSON lines, gzipped and not, in folders."""
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "a.txt").write_text("a plain text, é and 😀\n")
    (root / "b.txt.gz").write_bytes(gzip.compress(b"a packed one"))
    lines(root / "deep" / "c.jsonl", "first", "second\nof two lines", "", "😀 \ud800 half a pair", body="no")
    (root / "deep" / "er" / "d.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "packed line"}\n\n{"text": "last"}'))
    (root / "deep" / "e.bin").write_bytes(b"not asked for")
    return root


EVERY_TEXT = {
    "texts/a.txt": "a plain text, é and 😀\n",
    "texts/b.txt.gz": "a packed one",
    "texts/deep/c.jsonl:1": "first",
    "texts/deep/c.jsonl:2": "second\nof two lines",
    "texts/deep/c.jsonl:4": "😀 ��� half a pair",
    "texts/deep/er/d.jsonl.gz:2": "packed line",
    "texts/deep/er/d.jsonl.gz:4": "last",
}


# ---- sources -----------------------------------------------------------------------------------------------------


def test_files_folders_and_globs(folder, tmp_path):
    made = prepare(tmp_path / "all.h5", [folder])
    assert texts_of(made.path) == EVERY_TEXT
    assert (made.documents, made.broken) == (7, 3)
    assert made.left_out == {"empty": 1, "duplicate": 0, "not UTF-8": 0}
    made = prepare(tmp_path / "some.h5", [folder / "**" / "*.gz", folder / "a.txt", folder / "b.txt.gz"])
    assert list(tokens_of(made.path)) and set(texts_of(made.path)) == {
        "texts/b.txt.gz", "texts/deep/er/d.jsonl.gz:2", "texts/deep/er/d.jsonl.gz:4", "a.txt",
    }  # fmt: skip
    assert made.left_out["duplicate"] == 1


@pytest.mark.parametrize("name", ["tokens", "names", "state.json", "lock", "x"])
def test_any_name_will_do(folder, tmp_path, name):
    assert texts_of(prepare(tmp_path / name, [folder]).path) == EVERY_TEXT


def test_another_field(folder, tmp_path):
    lines(folder / "f.jsonl", "of no use", body="of use")
    made = prepare(tmp_path / "x.h5", [folder / "f.jsonl", folder / "deep" / "c.jsonl"], Rules(field="body"))
    assert set(texts_of(made.path).values()) == {"of use", "no"}
    assert made.left_out["duplicate"] == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", r"x\.jsonl:1 has no text 'text', it has : name it by --field"),
        (b'{"text": "a"}\n{"body": "b", "id": 3}\n', r"x\.jsonl:2 has no text 'text', it has 'body', 'id'"),
        (b'{"text": 3}', r"x\.jsonl:1 has no text"),
        (b"[1, 2]", r"x\.jsonl:1 has no text 'text', it is no object"),
        (b'{"text": "a"}\n{"text', r"x\.jsonl:2 is not JSON"),
        (b"[" * 100_000, r"x\.jsonl:1 is not JSON"),
    ],
)
def test_what_is_not_json_lines_is_refused_by_its_number(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message) as refused:
        prepare(tmp_path / "x.h5", [tmp_path / "x.jsonl"])
    assert "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_a_line_without_end_is_refused_before_memory_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE_BYTES", 100)
    (tmp_path / "x.jsonl").write_bytes(b" " * 101)
    with pytest.raises(InputError, match=r"x\.jsonl:1 is longer than 100 bytes"):
        prepare(tmp_path / "x.h5", [tmp_path / "x.jsonl"])


@pytest.mark.parametrize(
    "content", [gzip.compress(b"whole" * 99, mtime=0)[:-9], b"not packed at all"], ids=["cut", "not packed"]
)
def test_a_broken_gzip_is_refused(tmp_path, content):
    (tmp_path / "x.txt.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read .*x\.txt\.gz"):
        prepare(tmp_path / "x.h5", [tmp_path / "x.txt.gz"])


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")

    def meddle(what, done_bytes, of_bytes):
        path.write_bytes(b"longer than before")

    with pytest.raises(InputError, match=r"a\.txt changed"):
        prepare(tmp_path / "x.h5", [path], tell=meddle)


# ---- broken UTF-8 ------------------------------------------------------------------------------------------------


def test_however_bytes_are_cut_they_are_pythons_text():
    chance = random.Random(1)
    wild = [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xef\xbf\xbd", "é€😀".encode(), b"plain"]
    for _ in range(300):
        content = b"".join(chance.choices(wild, k=chance.randrange(12)))
        cuts = sorted(chance.choices(range(len(content) + 1), k=4))
        blocks = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        utf8 = Utf8("replace")
        assert "".join(utf8.texts("x", blocks)) == content.decode(errors="replace")
        assert utf8.broken == len(content.decode(errors="replace")) - len(content.decode(errors="replace").replace(
            "\ufffd", "")) - content.count(b"\xef\xbf\xbd")  # fmt: skip
        if utf8.broken:
            with pytest.raises(Broken):
                list(Utf8("skip").texts("x", blocks))
            with pytest.raises(UnicodeDecodeError) as wanted:
                content.decode()
            with pytest.raises(InputError, match=f"^x is not UTF-8 at byte {wanted.value.start}:"):
                list(Utf8("strict").texts("x", blocks))


def test_bytes_that_are_no_text_stay_so_in_json_lines(tmp_path):
    """As they stand in a line, each of those that may, and half a pair that an escape spells."""
    wild = bytes(range(0x80, 0x100)) + b" \xe2\x82 \xf0\x9f\x98 " + "é€😀".encode()  # begun, each is one place
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + wild + b'\\udc00 end"}\n')
    made = prepare(tmp_path / "x.h5", [tmp_path / "x.jsonl"], Rules(validation_fraction=0))
    wanted = (wild + b"\xed\xb0\x80 end").decode(errors="replace")
    assert "".join(texts_of(made.path).values()) == wanted and made.broken == wanted.count("\ufffd")


def test_broken_documents_are_left_out_without_a_trace(folder, tmp_path):
    (folder / "00.txt").write_bytes(b"x" * 3_000_000 + b"\xff")
    made = prepare(tmp_path / "x.h5", [folder], Rules(errors="skip"))
    assert made.left_out == {"empty": 1, "duplicate": 0, "not UTF-8": 2} and made.broken == 0
    assert texts_of(made.path) == {name: t for name, t in EVERY_TEXT.items() if name != "texts/deep/c.jsonl:4"}
    with pytest.raises(InputError, match=r"texts/00\.txt is not UTF-8 at byte 3000000: try --errors replace or skip"):
        prepare(tmp_path / "y.h5", [folder], Rules(errors="strict"))
    with pytest.raises(InputError, match=r"errors=ignore is no rule .* replace, skip, strict"):
        prepare(tmp_path / "y.h5", [folder], Rules(errors="ignore"))


# ---- tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return learn(400, [WORDS])


def test_pieces_are_cut_before_white_space_and_nowhere_else():
    chance = random.Random(2)
    for _ in range(200):
        text = "".join(chance.choices("ab \n\té", k=chance.randrange(60)))
        size = chance.randrange(1, 20)
        cut = list(pieces([text], size))
        assert "".join(cut) == text and all(0 < len(piece) <= size for piece in cut)
        for before, after in pairwise(cut):
            inside = any(a not in " \n\t" and b in " \n\t" for a, b in pairwise(before + after[0]))
            assert not inside or (before[-1] not in " \n\t" and after[0] in " \n\t")
        start = chance.randrange(len(text) + 1)
        assert list(pieces([text[:start], "", text[start:]], size)) == cut


def test_a_text_has_the_same_tokens_in_pieces_as_whole(bpe, monkeypatch):
    whole = np.concatenate(list(bpe.encode([WORDS])))
    library = tokenizer._loaded(bpe.json)
    assert whole.tolist() == library.encode(WORDS, add_special_tokens=False).ids
    for size in (40, 100, 1000):
        monkeypatch.setattr(tokenizer, "PIECE", size)
        assert np.array_equal(np.concatenate(list(bpe.encode([WORDS[:777], WORDS[777:]]))), whole)


@pytest.mark.parametrize("asked", ["byte", "bpe:300", "given"])
def test_tokens_are_the_text(asked, bpe, folder, tmp_path):
    given = tmp_path / "tokenizer.json"
    given.write_text(bpe.json)
    (folder / "special.txt").write_text(f"a text that spells {END} is a text")
    made = prepare(tmp_path / "x.h5", [folder], Rules(tokenizer=str(given) if asked == "given" else asked))
    assert texts_of(made.path) == {**EVERY_TEXT, "texts/special.txt": f"a text that spells {END} is a text"}
    opened = open_corpus(made.path, "train", 4)
    assert opened.tokenizer.json == {"byte": None, "given": bpe.json}.get(asked, opened.tokenizer.json)
    assert (
        opened.vocabulary
        == made.vocabulary
        == opened.tokenizer.vocabulary
        <= {"byte": 257, "bpe:300": 300}.get(asked, 400)
    )
    for name, ids in tokens_of(made.path).items():
        assert opened.tokenizer.end_of_document not in ids[:-1], name


def test_a_text_alone_is_cut_in_tokens(bpe, tmp_path):
    made = prepare(tmp_path / "x.h5", [TEXT], Rules(tokenizer="bpe:300"))
    assert "".join(texts_of(made.path).values()) == WORDS
    assert made.validation_tokens / made.train_tokens == pytest.approx(1 / 9, rel=0.02)


def words_json(vocabulary, end):
    """A tokenizer.json of whole words."""
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {**vocabulary, end: len(vocabulary)}, "unk_token": "a"},
        }
    )


@pytest.mark.parametrize(("last", "dtype"), [(255, "u1"), (256, "<u2"), (65535, "<u2"), (65536, "<u4")])
def test_tokens_have_the_smallest_type_with_room(tmp_path, last, dtype):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text(words_json({"a": 0, "b": last}, "</s>").replace(f'"</s>": {2}', '"</s>": 1'))
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("a b b a b" + " a" * number)
    made = prepare(tmp_path / "x.h5", [tmp_path], Rules(tokenizer=str(tmp_path / "t.json")))
    opened = open_corpus(made.path, "train", 2)
    assert (opened.tokens.dtype, opened.vocabulary) == (np.dtype(dtype), last + 1)
    name = f"{tmp_path.name}/0.txt"
    assert tokens_of(made.path)[name].tolist() == [0, last, last, 0, last, 1]


@pytest.mark.parametrize(
    ("parts", "cut"),
    [
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, False),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, False),
        ({"merges": [".\n"]}, False),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, True),
    ],
    ids=["prefix", "first mark", "first space", "over the edge", "words"],
)
@pytest.mark.parametrize("space", [" ", "\n"], ids=["spaces", "lines"])
def test_a_text_of_many_pieces_has_the_tokens_of_the_whole(parts, cut, space, monkeypatch):
    """Also where every text begins with a mark."""
    library = pytest.importorskip("tokenizers").Tokenizer
    letters = [*"ab._ \nĠĊ", *parts.get("merges", ())]
    model = {
        "type": "BPE", "vocab": {letter: at for at, letter in enumerate(["</s>", *letters])},
        "merges": [list(pair) for pair in parts.get("merges", ())],
    }  # fmt: skip
    frame = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    how = json.dumps({**frame, **{key: part for key, part in parts.items() if key != "merges"}, "model": model})
    monkeypatch.setattr(tokenizer, "PIECE", 50)
    asked = []
    monkeypatch.setattr(tokenizer, "pieces", lambda *of: asked.append(of) or pieces(*of))
    text = f"ab.{space}" * 200
    found = np.concatenate(list(from_json(how, "x").encode([text[:77], text[77:]])))
    assert found.tolist() == library.from_str(how).encode(text, add_special_tokens=False).ids
    assert bool(asked) == cut


def test_a_given_one_is_refused_by_what_is_wrong(tmp_path):
    path, text = tmp_path / "t.json", tmp_path / "a.txt"
    text.write_text("a b")

    def refused(message, asked=str(path), **more):
        with pytest.raises(InputError, match=message) as error:
            prepare(tmp_path / "x.h5", [text], Rules(tokenizer=asked, **more))
        assert "\n" not in str(error.value) and not (tmp_path / "x.h5").exists()

    refused(r"there is no tokenizer .*t\.json: give byte, bpe:SIZE or a tokenizer\.json")
    for asked in ("bpe:256", "bpe:", "bpe:1e3", "bpe:99999999"):
        refused(f"{asked}: a BPE has from 257 .* to 10000000 tokens", asked)
    for content in ("{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'):
        path.write_text(content)
        refused(r"t\.json is no tokenizer\.json")
    path.write_text(words_json({"a": 0}, "stop"))
    refused(r"t\.json has no token <\|endoftext\|> or .*: name the one that closes a document by --end-token")
    refused(r"t\.json has no token halt:", end_name="halt")
    pytest.importorskip("tokenizers")
    assert prepare(tmp_path / "x.h5", [text], Rules(tokenizer=str(path), end_name="stop")).vocabulary == 2
    path.write_text(words_json({"a": 0}, "</s>").replace("WordLevel", "Hieroglyphs"))
    with pytest.raises(InputError, match=r"the tokenizer\.json cannot be loaded"):
        prepare(tmp_path / "y.h5", [text], Rules(tokenizer=str(path)))


def test_without_the_library_one_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["data", "prepare", "-o", str(tmp_path / "x.h5"), str(TEXT), "--tokenizer", "bpe:300"]) == 2
    assert capsys.readouterr().err == (
        "chimera-mpi: bpe:300 needs the library tokenizers: pip install 'chimera-mpi[hf]'\n"
    )
    assert not list(tmp_path.iterdir())
    assert main(["data", "prepare", "-o", str(tmp_path / "x.h5"), str(TEXT)]) == 0


def test_training_reads_tokens_without_the_library(tmp_path):
    pytest.importorskip("tokenizers")
    made = prepare(tmp_path / "x.h5", [TEXT], Rules(tokenizer="bpe:300"))
    code = (
        f"import sys; sys.modules['tokenizers'] = None\nfrom chimera_mpi.data import *; from pathlib import Path\n"
        f"print(open_corpus(Path({str(made.path)!r}), 'train', 8).sample([0])[0].shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(1, 8)\n", done.stderr


def test_bpe_is_learnt_alike_by_other_processes_and_threads(tmp_path):
    pytest.importorskip("tokenizers")
    for name, threads in (("one", "1"), ("two", "2")):
        command = ["data", "prepare", "-o", f"{name}.h5", str(TEXT), str(Path(json.__file__).parent), "--tokenizer"]
        done = subprocess.run(
            [sys.executable, "-m", "chimera_mpi", *command, "bpe:700"],
            cwd=tmp_path, timeout=60, capture_output=True, text=True, env={**os.environ, "RAYON_NUM_THREADS": threads},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()


def test_a_large_corpus_is_sampled_for_its_vocabulary(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    seen = []
    monkeypatch.setattr("chimera_mpi.data.preparation.LEARN_FROM_BYTES", 4000)
    monkeypatch.setattr("chimera_mpi.data.preparation.PIECE", 500)
    monkeypatch.setattr(
        "chimera_mpi.data.preparation.learn", lambda size, texts: (seen.extend(texts), learn(size, seen))[1]
    )
    (tmp_path / "a.txt").write_text(WORDS * (1 + 20_000 // len(WORDS)))
    prepare(tmp_path / "x.h5", [tmp_path / "a.txt"], Rules(tokenizer="bpe:300"))
    assert 2000 < sum(map(len, seen)) <= 4500


def test_berts_own_tokens_are_those_of_the_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (tmp_path / "t.json").write_text(
        words_json({name: n for n, name in enumerate(names)}, "x").replace('"a"}', '"[UNK]"}')
    )
    (tmp_path / "a.txt").write_text(" ".join(random.Random(0).choices("abcdefgh", k=900)))
    made = prepare(tmp_path / "x.h5", [tmp_path / "a.txt"], Rules(tokenizer=str(tmp_path / "t.json")))
    opened = open_corpus(made.path, "train", 16)
    assert opened.specials == (2, 3, 4, 0) and opened.vocabulary_with_specials == opened.vocabulary == 14
    (ids, *_), (words, _) = MaskedBatches(opened, (200,)).micro_batch(0, 0)
    assert (ids[:, 0] == 2).all() and (ids[:, -1] == 3).all() and (ids.max() < 14)
    assert not np.isin(words, [0, 2, 3, 4]).any() and (ids[words >= 0] == 4).mean() > 0.7


def test_a_file_from_before_there_were_tokenizers_opens(tmp_path):
    made = prepare(tmp_path / "x.h5", [TEXT])
    with h5py.File(made.path, "r+") as file:
        del file.attrs["tokenizer"]
    assert open_corpus(made.path).tokenizer == BYTES
    assert open_corpus(made.path).specials == (257, 258, 259, 260)


def test_a_damaged_tokenizer_is_refused(bpe, tmp_path):
    made = prepare(tmp_path / "x.h5", [TEXT], Rules(tokenizer="bpe:300"))
    with h5py.File(made.path, "r+") as file:
        file[corpus.TOKENIZER][100] ^= 1
    with pytest.raises(InputError, match="not a whole token file"):
        open_corpus(made.path)
    with h5py.File(made.path, "r+") as file:
        del file[corpus.TOKENIZER]
    with pytest.raises(InputError, match="not a whole token file"):
        open_corpus(made.path)


@pytest.mark.parametrize("how", ["byte", "bpe"])
def test_text_comes_out_as_soon_as_its_bytes_are_there(how, bpe):
    how = BYTES if how == "byte" else bpe
    text = "é€😀 and ünd"
    ids = [int(number) for part in how.encode([text]) for number in part]
    out = list(how.decoded([], iter(ids)))
    assert "".join(out) == text and "\ufffd" not in "".join(out)
    assert out[0] == "" and "é" in out  # it has two tokens, of which the first is nothing by itself
    assert "".join(how.decoded([], ids[:1])) == "\ufffd"


def test_the_json_of_bytes_is_that_of_bytes():
    library = pytest.importorskip("tokenizers").Tokenizer.from_str(BYTES.as_json())
    wild = "a b\n\t é€😀\x00\x7f don't  \u00a0"
    assert library.encode(wild).ids == list(wild.encode())
    assert library.decode(list(wild.encode())) == wild
    assert library.token_to_id(END) == 256
    assert from_json(BYTES.as_json(), "x") == BYTES


# ---- interruptions, room and memory ------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    root = tmp_path / "many"
    root.mkdir()
    for number in range(40):
        (root / f"{number:02}.txt").write_text(f"{number % 35} " + WORDS[:: 1 + number % 35])
        lines(root / f"{number:02}.jsonl", f"line {number}", "", "\ud800")
    return root


KILLED = """
import os, signal, sys
from pathlib import Path
from chimera_mpi.data import preparation, spool
output, many, asked, last = sys.argv[1:]
preparation.SAVE_EVERY_S = spool.SAVE_EVERY_S = 0.0
add = spool.Spool._add
def die(self, document, errors):
    add(self, document, errors)
    if self.sources == int(last):
        for file in self._files.values():
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
spool.Spool._add = die
preparation.prepare(Path(output), [Path(many)], preparation.Rules(tokenizer=asked))
"""


@pytest.mark.parametrize("asked", ["byte", "bpe:280"])
def test_a_killed_preparation_goes_on_and_gives_the_same_file(many, tmp_path, monkeypatch, asked):
    """By kill -9, in one source and in another; none that is done is read again."""
    if asked != "byte":
        pytest.importorskip("tokenizers")
    straight = prepare(tmp_path / "straight.h5", [many], Rules(tokenizer=asked))
    output = tmp_path / "killed.h5"
    for source in (3, 60):
        command = [sys.executable, "-c", KILLED, str(output), str(many), asked, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL and not output.exists(), done.stderr
        state = json.loads((tmp_path / ".killed.h5.part" / "state.json").read_text())
        assert state["sources"] == source
    read = []
    documents = sources.File.documents
    monkeypatch.setattr(
        sources.File, "documents", lambda self, tell: (read.append(self.name), documents(self, tell))[1]
    )
    again = prepare(output, [many], Rules(tokenizer=asked))
    assert again._replace(path=straight.path) == straight
    assert output.read_bytes() == straight.path.read_bytes()
    assert len(read) == 20
    assert not (tmp_path / ".killed.h5.part").exists()


def interrupted(output, sources, after=20):
    """A preparation that is stopped by the keyboard."""

    def stop(what, done_bytes, of_bytes):
        nonlocal after
        after -= 1
        if not after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(output, sources, tell=stop)


def test_what_is_asked_otherwise_begins_anew(many, tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "SAVE_EVERY_S", 0.0)
    output = tmp_path / "x.h5"
    for change in ({"field": "text", "errors": "skip"}, {}):
        interrupted(output, [many])
        assert (tmp_path / ".x.h5.part" / "state.json").exists()
        if not change:
            (many / "00.txt").write_text("another text")
        made = prepare(output, [many], Rules(**change))
        assert made.broken == (0 if change else 40 * 3)
        assert ("another text" in texts_of(output).values()) == (not change)
        output.unlink()


def test_one_that_fails_keeps_what_is_done_and_says_so(many, tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "SAVE_EVERY_S", 0.0)
    (many / "35.jsonl").write_text("no JSON")
    with pytest.raises(
        InputError, match=r"35\.jsonl:1 is not JSON .*done is in .*\.x\.h5\.part: the same command goes"
    ):
        prepare(tmp_path / "x.h5", [many])
    assert not (tmp_path / "x.h5").exists()


def test_its_name_comes_after_its_bytes_and_before_what_it_was_made_of_goes(many, tmp_path, monkeypatch):
    """A machine that loses power must not leave a file of holes under the name, with nothing to go on from."""
    monkeypatch.setattr(spool, "SAVE_EVERY_S", 0.0)
    output, synced = tmp_path / "out.h5", []

    def watched(path):
        synced.append((path.name, output.exists(), (tmp_path / ".out.h5.part" / "state.json").exists()))

    monkeypatch.setattr(preparation, "sync", watched)
    prepare(output, [many])
    assert synced == [("whole.h5", False, True), (tmp_path.name, True, True)]
    assert not (tmp_path / ".out.h5.part").exists()


def test_two_cannot_prepare_one_file(many, tmp_path):
    refused = []

    def another(what, done_bytes, of_bytes):
        if not refused:
            with pytest.raises(
                InputError, match=rf"x\.h5 is being prepared by process {os.getpid()} on .*: wait for its end"
            ):
                prepare(tmp_path / "x.h5", [many])
            refused.append(True)

    assert prepare(tmp_path / "x.h5", [many], tell=another).documents and refused
    assert sorted(os.listdir(tmp_path)) == ["many", "x.h5"]


def test_runs_that_start_together_wait_for_the_one_that_prepares(tmp_path, monkeypatch, capsys):
    path, naps = tmp_path / "data" / "corpus.h5", []
    path.parent.mkdir()
    with ExitStack() as other:
        other.enter_context(spool.spool_folder(path))

        def nap(seconds):
            naps.append(seconds)
            if len(naps) == 3:
                path.write_bytes(b"whole")
                other.close()

        monkeypatch.setattr(_job.time, "sleep", nap)
        _job._prepare_default(path)
    assert path.read_bytes() == b"whole" and len(naps) == 3
    told = f"{path} is being prepared by process {os.getpid()} on {platform.node()}, for whose end this run waits\n"
    assert capsys.readouterr().out == told


def test_a_run_takes_the_data_that_another_has_just_prepared(tmp_path, monkeypatch):
    path = tmp_path / "corpus.h5"

    def too_late(output):
        output.write_bytes(b"whole")
        raise InputError(f"{output} exists")

    monkeypatch.setattr(data, "prepare", too_late)
    _job._prepare_default(path)
    assert path.read_bytes() == b"whole"


def test_where_nothing_can_be_written_one_line_says_so(capsys):
    assert main(["data", "prepare", "-o", "/proc/none/x.h5", str(TEXT)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "cannot write /proc/none/x.h5" in err


def test_the_line_that_is_printed_counts_what_was_left_out(folder, tmp_path, capsys):
    (folder / "again.txt").write_text("a plain text, é and 😀\n")
    assert main(["data", "prepare", "-o", str(tmp_path / "x" / "y.h5"), str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "y.h5: 7 documents, " in first and "vocabulary 257" in first
    assert second == "left out: 1 empty, 1 duplicate; 3 places that were not UTF-8 replaced by U+FFFD"


@pytest.mark.parametrize(("asked", "megabytes"), [("byte", 60), ("bpe:300", 4)])
def test_memory_does_not_grow_with_a_line(tmp_path, asked, megabytes):
    """All of it at once would be many times as much, with a tokenizer a hundred bytes a token."""
    if asked != "byte":
        pytest.importorskip("tokenizers")
    words = (WORDS.replace("\n", " ") * (1 + 10**6 // len(WORDS)))[: 10**6]
    with open(tmp_path / "line.txt", "w") as file:
        for _ in range(megabytes):
            file.write(words)
    (tmp_path / "small.txt").write_text(words)
    code = (
        "import sys; from chimera_mpi.cli import main; from chimera_mpi.host import peak_resident_bytes\n"
        "main(sys.argv[1:]); print(peak_resident_bytes())"
    )
    peaks = []
    for name in ("small", "line"):
        command = ["data", "prepare", "-o", f"{name}.h5", f"{name}.txt", "--tokenizer", asked]
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 40e6, peaks
