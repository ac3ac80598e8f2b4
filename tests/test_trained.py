"""Weights go to Hugging Face's folders and come from there, to the bit; its models and ours say the same."""

import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
import torch
from safetensors.torch import load_file, save_file

from chimera_mpi.checkpoint import Draft, open_checkpoint, read_checkpoint
from chimera_mpi.cli import main
from chimera_mpi.commands._desk import beginning
from chimera_mpi.config import load
from chimera_mpi.data import BYTES, Batches, Rules, even_sizes, open_corpus, prepare
from chimera_mpi.data.tokenizer import learn
from chimera_mpi.errors import InputError
from chimera_mpi.models import BERT, GPT, SHAPE, cross_entropy, to_huggingface, to_huggingface_config
from chimera_mpi.runlog import read_run
from chimera_mpi.train import check_resumed, plan_job
from chimera_mpi.trained import Sampling, continued, export_model, import_model, open_trained

os.environ["HF_HUB_OFFLINE"] = "1"

SHAPES = [
    GPT(layers=3, hidden=35, heads=5, vocabulary=257, positions=19, tied=True, dropout=0.1),
    GPT(layers=1, hidden=16, heads=1, vocabulary=261, positions=64, tied=False, dropout=0.0),
    BERT(layers=2, hidden=33, heads=3, vocabulary=263, positions=21, tied=True, dropout=0.1),
    BERT(layers=3, hidden=16, heads=2, vocabulary=300, positions=17, tied=False, dropout=0.0),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{type(s).__name__}-tied={s.tied}")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are slower on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def hf():
    return pytest.importorskip("transformers")


def their_model(hf, shape, seed=0):
    """A model of theirs with random weights that are far from their start."""
    torch.manual_seed(seed)
    settings = {k: v for k, v in to_huggingface_config(shape).items() if k not in ("architectures", "model_type")}
    of_config, of_model = (
        (hf.GPT2Config, hf.GPT2LMHeadModel) if isinstance(shape, GPT) else (hf.BertConfig, hf.BertForPreTraining)
    )
    numbers = {"bos_token_id": None, "eos_token_id": None} if isinstance(shape, GPT) else {"pad_token_id": None}
    model = of_model(of_config(**settings, **numbers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if isinstance(shape, BERT):  # which nothing reads: the decoder has the bias that counts
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    return model


def random_weights(shape, seed=0):
    """Under their names, without their library."""
    from chimera_mpi.models import bert, gpt, make_layer

    model = gpt(shape) if isinstance(shape, GPT) else bert(shape)
    layers = {n: make_layer(model, n, seed).state_dict() for n in range(len(model.layers))}
    return to_huggingface(shape, layers)


def folder_of(path, shape, **changes):
    """A folder as theirs are, without their library; `changes` of the configuration."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**to_huggingface_config(shape), **changes}))
    save_file(random_weights(shape), path / "model.safetensors", metadata={"format": "pt"})
    return path


def logits_of(trained, ids, segments):
    x = (ids, segments) if isinstance(trained.shape, BERT) else (ids,)
    for layer in trained.layers():
        x = layer(*x)
        x = x if isinstance(x, tuple) else (x,)
    return x


def their_logits(model, shape, ids, segments):
    with torch.no_grad():
        if isinstance(shape, GPT):
            return (model(input_ids=ids).logits,)
        found = model(input_ids=ids, token_type_ids=segments)
        return found.prediction_logits, found.seq_relationship_logits


def assert_same_logits(trained, model):
    shape = trained.shape
    ids = torch.randint(shape.vocabulary, (3, shape.positions))
    segments = torch.randint(2, ids.shape)
    ours, theirs = logits_of(trained, ids, segments), their_logits(model, shape, ids, segments)
    assert len(ours) == len(theirs) and max(map(torch.max, theirs)) > 0.1
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


def loaded(hf, folder, shape):
    """By from_pretrained, which must miss nothing and have nothing left over."""
    of_model = hf.GPT2LMHeadModel if isinstance(shape, GPT) else hf.BertForPreTraining
    model, told = of_model.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


# ---- there and back ----------------------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "several"])
def test_both_ways_the_logits_are_theirs_and_the_weights_the_same_bits(hf, shape, shards, tmp_path):
    theirs = their_model(hf, shape)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if shards else "5GB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == shards
    made = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert made.shape == shape and made.tokenizer is None and made.checkpoint.weights_only
    assert_same_logits(open_trained(tmp_path / "ours"), theirs)

    export_model(open_trained(tmp_path / "ours"), tmp_path / "exported")
    again = loaded(hf, tmp_path / "exported", shape)
    wanted = theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in again.state_dict().items())
    assert_same_logits(open_trained(tmp_path / "ours"), again)

    back = import_model(tmp_path / "exported" / "model.safetensors", tmp_path / "back")
    assert back.checkpoint.files == made.checkpoint.files  # by checksum
    assert back.checkpoint.facts["identity"] == made.checkpoint.facts["identity"]


@each_shape
def test_without_their_library(shape, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    source = folder_of(tmp_path / "theirs", shape)
    (source / "tokenizer.json").write_text(BYTES.as_json())
    assert main(["import", str(source), "-o", str(tmp_path / "new" / "ours")]) == 0
    assert main(["export", str(tmp_path / "new" / "ours"), "-o", str(tmp_path / "exported")]) == 0
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "exported")) == files
    assert main(["import", str(tmp_path / "exported"), "-o", str(tmp_path / "back")]) == 0
    first, back = open_checkpoint(tmp_path / "new" / "ours"), open_checkpoint(tmp_path / "back")
    assert back.files == first.files and {**back.facts, "source": "theirs"} == first.facts
    assert open_trained(tmp_path / "back").tokenizer == BYTES
    assert sorted(os.listdir(tmp_path)) == ["back", "exported", "new", "theirs"]


@each_shape
def test_import_says_how_to_train_it(shape, tmp_path, capsys):
    assert main(["import", str(folder_of(tmp_path / "theirs", shape)), "-o", str(tmp_path / "ours")]) == 0
    (words,) = re.findall(r"to train it: chimera-mpi train (.*)\n", capsys.readouterr().out)
    preset, *keys = words.split()
    config = load(preset, keys)
    assert config.model == type(shape).__name__.lower() and config.resume == str(tmp_path / "ours")
    assert all(getattr(config, key) == getattr(shape, key) for key in SHAPE if key != "dropout")


def test_half_precision_comes_as_float32_and_float64_stays(tmp_path):
    source = folder_of(tmp_path / "theirs", SHAPES[0])
    weights = load_file(source / "model.safetensors")
    for dtype, kept in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        save_file({name: weight.to(dtype) for name, weight in weights.items()}, source / "model.safetensors")
        made = import_model(source, tmp_path / "ours")
        found = made.checkpoint.weights(0)["tokens.weight"]
        assert found.dtype == kept and torch.equal(found, weights["transformer.wte.weight"].to(dtype).to(kept))
        shutil.rmtree(tmp_path / "ours")


def test_a_checkpoint_from_before_there_were_tokenizers_has_bytes(tmp_path):
    made, layers = read_checkpoint(
        import_model(folder_of(tmp_path / "theirs", GPT_), tmp_path / "ours").checkpoint.path
    )
    facts = {key: value for key, value in made.facts.items() if key != "tokenizer"}
    old = Draft(tmp_path / "old", 7)
    old.commit({index: old.write(index, layer) for index, layer in enumerate(layers)}, facts, 1, 0)
    assert open_trained(tmp_path / "ours").tokenizer is None
    assert open_trained(tmp_path / "old").tokenizer == BYTES


def test_a_tokenizer_that_is_gone_or_another_is_damage(tmp_path):
    source = folder_of(tmp_path / "theirs", GPT_)
    (source / "tokenizer.json").write_text(BYTES.as_json().replace("}", " }", 1))
    import_model(source, tmp_path / "ours")
    assert open_trained(tmp_path / "ours").tokenizer.json
    path = tmp_path / "ours" / "tokenizer.json"
    content = path.read_text()
    for change in (content.replace(":", ";", 1), content[:-1]):
        path.write_text(change)
        with pytest.raises(InputError, match=r"tokenizer\.json is damaged"):
            open_trained(tmp_path / "ours")
    path.unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        open_trained(tmp_path / "ours")


# ---- refusals ----------------------------------------------------------------------------------------------------


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def without(name):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors")

    return change


def put(name, weight):
    return lambda folder: save_file(
        {**load_file(folder / "model.safetensors"), name: weight}, folder / "model.safetensors"
    )


def index(folder, **places):
    weights = load_file(folder / "model.safetensors")
    names = dict.fromkeys(weights, "model.safetensors") | places
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")


def config(content):
    return lambda folder: (folder / "config.json").write_text(content)


GPT_, BERT_ = SHAPES[0], SHAPES[2]
WRONG_FOLDERS = {
    "llama": (GPT_, {"model_type": "llama"}, None, r"config\.json: model_type=llama is not built here"),
    "activation": (GPT_, {"activation_function": "relu"}, None, r"activation_function=relu, and a GPT .*"),
    "inner": (GPT_, {"n_inner": 99}, None, r"n_inner=99, and a GPT of this shape has n_inner=140 here"),
    "by layer": (GPT_, {"scale_attn_by_inverse_layer_idx": True}, None, "scale_attn_by_inverse_layer_idx=True, and"),
    "unscaled": (GPT_, {"scale_attn_weights": False}, None, "scale_attn_weights=False, and a GPT"),
    "cross": (GPT_, {"add_cross_attention": True}, None, "add_cross_attention=True, and"),
    "decoder": (BERT_, {"is_decoder": True}, None, "is_decoder=True, and a BERT"),
    "relative": (BERT_, {"position_embedding_type": "relative_key"}, None, "position_embedding_type=relative_key"),
    "odd value": (BERT_, {"hidden_act": ["gelu"]}, None, r"hidden_act=\['gelu'\], and"),
    "segments": (BERT_, {"type_vocab_size": 1}, None, "type_vocab_size=1, and samples have 2 segments here"),
    "heads": (GPT_, {"n_head": 4}, None, r"config\.json: hidden=35 does not divide into heads=4"),
    "words for sizes": (GPT_, {"n_layer": "three"}, None, r"config\.json: n_layer='three' is no whole number"),
    "no config": (GPT_, {}, lambda folder: (folder / "config.json").unlink(), r"there is no config\.json"),
    "half a config": (GPT_, {}, config('{"model_type": "gp'), r"config\.json: it is not understood"),
    "a list": (GPT_, {}, config("[]"), r"config\.json: it is a list, not an object"),
    "missing": (GPT_, {}, without("transformer.h.1.ln_2.bias"), r"no weights 'transformer\.h\.1\.ln_2\.bias'"),
    "extra": (GPT_, {}, put("score.weight", torch.ones(2)), r"no place in a GPT for 1 weights, .*score\.weight'"),
    "another shape": (
        BERT_, {}, put("bert.pooler.dense.bias", torch.ones(9)), r"'pooler\.bias' of layer 3 is \[9\], .* for \[33\]",
    ),
    "quantized": (
        GPT_, {}, put("transformer.wpe.weight", torch.ones(19, 35, dtype=torch.int8)), r"wpe\.weight' is torch\.int8",
    ),
    "truncated": (GPT_, {}, cut, r"model\.safetensors is no whole safetensors file"),
    "pickle": (GPT_, {}, pickled, r"pytorch_model\.bin is a pickle, which may run anything"),
    "nothing": (GPT_, {}, lambda folder: (folder / "model.safetensors").unlink(), "has no safetensors file"),
    "index elsewhere": (
        GPT_, {}, lambda f: index(f, **{"transformer.wte.weight": "../x.safetensors"}), r"names '\.\./x\.safetensors'",
    ),
    "index to nothing": (
        GPT_, {}, lambda f: index(f, **{"transformer.wte.weight": "x.safetensors"}), "differ in 'transformer.wte",
    ),
    "index of numbers": (
        GPT_, {}, lambda f: index(f, a=3, b=["c"]), r"index\.json names '3': its files are safetensors",
    ),
    "damaged index": (
        GPT_, {}, lambda f: (f / "model.safetensors.index.json").write_text("{}"), r"index\.json is not understood",
    ),
    "tokenizer": (GPT_, {}, lambda f: (f / "tokenizer.json").write_text("{}"), r"is no tokenizer\.json"),
    "tokens of words": (
        GPT_, {}, lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab": {"</s>": "x"}}}'),
        r"is no tokenizer\.json: ValueError: token '</s>' has the number 'x', which is not in \[0, 2\^31\)",
    ),
    "tokens below 0": (
        GPT_, {}, lambda f: (f / "tokenizer.json").write_text(
            '{"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": "</s>", "id": -5}]}'
        ), "token '</s>' has the number -5, which is not in",
    ),
    "half tied": (GPT_, {"tie_word_embeddings": "no"}, None, "tie_word_embeddings='no' is neither true nor false"),
    "endless": (GPT_, {"vocab_size": 10**30}, None, r"theirs: it is not understood: "),
    "larger tokenizer": (
        GPT(layers=1, hidden=4, heads=1, vocabulary=99, positions=4),
        {}, lambda f: (f / "tokenizer.json").write_text(BYTES.as_json()), r"has 257 tokens, the model 99",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_FOLDERS)
def test_what_is_not_ours_is_refused_in_one_line_and_leaves_nothing(wrong, tmp_path, capsys):
    shape, changes, damage, message = WRONG_FOLDERS[wrong]
    source = folder_of(tmp_path / "theirs", shape, **changes)
    if damage:
        damage(source)
    assert main(["import", str(source), "-o", str(tmp_path / "ours")]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    with pytest.raises(InputError, match=message):
        import_model(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["theirs"]


def test_files_and_outputs_that_are_no_such(tmp_path, capsys):
    source = folder_of(tmp_path / "theirs", GPT_)
    pickled(folder_of(tmp_path / "old", GPT_))
    import_model(source, tmp_path / "ours")
    before = sorted(os.listdir(tmp_path / "ours"))
    (tmp_path / "some.txt").write_text("text")
    bare, whole = Draft(tmp_path / "bare", 3), open_checkpoint(tmp_path / "ours")
    bare.commit({0: bare.write(0, {"weights/a": torch.ones(1)})}, {"config": {"model": "mine:build"}}, 1, 0)
    odd = Draft(tmp_path / "odd", 3)
    odd.commit({0: odd.write(0, {"weights/a": torch.ones(1)})}, whole.facts, 1, 0)
    wrong = {
        r"ours exists and stays as it is": ["import", source, "-o", tmp_path / "ours"],
        r"pytorch_model\.bin is a pickle": ["import", tmp_path / "old" / "pytorch_model.bin", "-o", tmp_path / "x"],
        r"there is no .*nowhere: give a folder": ["import", tmp_path / "nowhere", "-o", tmp_path / "x"],
        r"some\.txt is no safetensors file": ["import", tmp_path / "some.txt", "-o", tmp_path / "x"],
        r"cannot write /proc/none/x": ["import", source, "-o", "/proc/none/x"],
        r"theirs exists and stays as it is": ["export", tmp_path / "ours", "-o", source],
        r"cannot write /proc/none/y": ["export", tmp_path / "ours", "-o", "/proc/none/y"],
        r"there is no checkpoint .*nowhere": ["export", tmp_path / "nowhere", "-o", tmp_path / "x"],
        r"theirs is not a whole checkpoint": ["export", source, "-o", tmp_path / "x"],
        r"is of model=mine:build: give one of a gpt or a bert": ["export", tmp_path / "bare", "-o", tmp_path / "x"],
        r"has 1 layers, its model 5": ["export", tmp_path / "odd", "-o", tmp_path / "x"],
    }
    for message, words in wrong.items():
        assert main(list(map(str, words))) == 2, message
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1, err
        assert re.search(message, err), (message, err)
    assert sorted(os.listdir(tmp_path / "ours")) == before
    assert sorted(os.listdir(tmp_path)) == ["bare", "odd", "old", "ours", "some.txt", "theirs"]


def test_a_full_disk_under_an_export_is_told_in_a_line(tmp_path):
    import_model(folder_of(tmp_path / "theirs", GPT_), tmp_path / "ours")
    limited = (
        "import resource, sys\n"
        "from chimera_mpi.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "sys.exit(main(['export', 'ours', '-o', 'out']))\n"
    )
    done = subprocess.run([sys.executable, "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("chimera-mpi: cannot write out (") and "File too large" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


# ---- a run that begins with them, and what it says ---------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A GPT that was imported, trained on two ranks on data of a BPE, and exported."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("trained")
    text = (Path(__file__).parent.parent / "data" / "pipelines.txt").read_text()
    (root / "text.txt").write_text(text)
    prepare(root / "data.h5", [root / "text.txt"], Rules(tokenizer="bpe:300"))
    prepare(root / "bytes.h5", [root / "text.txt"])
    tokenizer = open_corpus(root / "data.h5", "train", 8).tokenizer
    shape = GPT(layers=2, hidden=24, heads=3, vocabulary=300, positions=16, dropout=0.0)
    source = folder_of(root / "theirs", shape)
    (source / "tokenizer.json").write_text(tokenizer.json)
    import_model(source, root / "start")
    keys = [f"{key}={str(getattr(shape, key)).lower()}" for key in SHAPE]
    words = [*keys, "resume=start", "data=data.h5", "steps=3", "sequence_length=8", "checkpoint=saved", "log=run.h5"]
    job = ["train", "gpt-tiny", "scheme=chimera", "depth=2", "micro_batches=2", "micro_batch_size=3", *words]
    done = launch.chimera(2, *job, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(root=root, said=done.stdout, tokenizer=tokenizer, job=job)


def test_a_run_begins_with_the_weights_that_were_imported(trained):
    assert "begins with the weights of start\n" in trained.said
    log = read_run(trained.root / "run.h5")
    batches = Batches(open_corpus(trained.root / "data.h5", "train", 8), even_sizes(6, 2), seed=0)
    layers, total, count = open_trained(trained.root / "start").layers(), 0.0, 0
    for number in range(2):
        x, targets = map(torch.from_numpy, batches.micro_batch(0, number))
        for layer in layers:
            x = layer(x)
        loss, targets_ = cross_entropy(x, targets)
        total, count = total + float(loss), count + float(targets_)
    assert log.steps["loss"][0] == pytest.approx(total / count, rel=1e-5)
    assert list(log.steps["step"]) == [0, 1, 2]
    saved = open_trained(trained.root / "saved")
    assert saved.checkpoint.step == 3 and not saved.checkpoint.weights_only
    assert saved.tokenizer == trained.tokenizer
    assert not torch.equal(saved.checkpoint.weights(1)["mlp.input.weight"], layers[1].mlp.input.weight)


def test_what_a_run_may_begin_with(trained):
    """Any data and batch; another model is refused in one line, other tokens are a remark."""
    start = open_checkpoint(trained.root / "start")
    mine, bytes_ = (open_corpus(trained.root / name, "train", 8) for name in ("data.h5", "bytes.h5"))

    def job(*words):
        return plan_job(load("gpt-tiny", [*trained.job[6:-3], "sequence_length=8", *words]), 1)

    for words in ([], ["seed=5"], ["optimizer=sgd"], ["micro_batch_size=7"], ["dropout=0.5"], ["precision=bf16"]):
        check_resumed(start, job(*words), bytes_)
    for key in ("hidden=48", "tied=false", "positions=17", "layers=3", "model=bert", "vocabulary=400"):
        with pytest.raises(InputError, match=f"start is of a run with {key.partition('=')[0]}="):
            check_resumed(start, job(key), mine)
    assert beginning(start, mine) == f"begins with the weights of {start.path}"
    assert beginning(start, bytes_) == (
        f"begins with the weights of {start.path}; its tokens are not those of {bytes_.path}: "
        f"prepare the data by --tokenizer {start.path}"
    )


def test_greedy_generation_is_theirs(hf, trained, capsys):
    export_model(open_trained(trained.root / "saved"), trained.root / "exported")
    model = loaded(hf, trained.root / "exported", SHAPES[0])
    tokenizer = hf.AutoTokenizer.from_pretrained(trained.root / "exported", local_files_only=True)
    prompt = "A pipeline"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == [int(n) for part in trained.tokenizer.encode([prompt]) for n in part]
    count = 16 - ids.shape[1]  # up to where the model has positions
    wanted = model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)[0, ids.shape[1] :].tolist()
    found = list(continued(open_trained(trained.root / "saved"), ids[0].tolist(), count, Sampling(temperature=0)))
    assert found == [number for number in wanted if number != trained.tokenizer.end_of_document] and len(found) > 3
    words = ["generate", str(trained.root / "saved"), "--prompt", prompt, "--temperature", "0", "--tokens", str(count)]
    assert main(words) == 0
    assert capsys.readouterr().out.rstrip("\n") == prompt + tokenizer.decode(found).rstrip("\n")
    assert tokenizer.eos_token_id == model.config.eos_token_id == trained.tokenizer.end_of_document


def test_the_text_is_that_of_the_seed(trained, capsys, monkeypatch):
    def said(*words):
        assert main(["generate", str(trained.root / "saved"), "--tokens", "40", *words]) == 0
        return capsys.readouterr().out

    assert said("--seed", "3") == said("--seed", "3") != said("--seed", "4")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("A pipeline ü".encode())))
    assert said("--prompt", "-", "--top-k", "1") == said("--prompt", "A pipeline ü", "--temperature", "0")


def test_the_window_slides_and_a_document_ends(tmp_path):
    shape = GPT(layers=2, hidden=24, heads=3, vocabulary=257, positions=6)
    source = folder_of(tmp_path / "theirs", shape)
    torch.manual_seed(0)
    lively = {name: w + 0.4 * torch.randn_like(w) for name, w in load_file(source / "model.safetensors").items()}
    save_file(lively, source / "model.safetensors")
    (source / "tokenizer.json").write_text(BYTES.as_json())
    import_model(source, tmp_path / "ours")
    model = open_trained(tmp_path / "ours")
    layers = model.layers()

    def logits(ids):
        x = torch.tensor([ids])
        for layer in layers:
            x = layer(x)
        return x[0, -1]

    ids = [5, 6, 7]
    for number in continued(model, ids[:], 30, Sampling(0)):
        assert number == int(logits(ids[-6:]).argmax())
        ids.append(number)
    assert len(ids) == 33 and len(set(ids)) > 5 and ids[-1] != int(logits(ids[:6]).argmax())

    ends = replace(model, tokenizer=replace(BYTES, end_of_document=ids[12]))
    assert list(continued(ends, ids[:3], 30, Sampling(0))) == ids[3 : ids.index(ids[12], 3)]
    drawn = {number for seed in range(12) for number in continued(model, [5], 1, Sampling(5.0, 2, seed))}
    assert drawn == set(logits([5]).topk(2).indices.tolist())


WRONG_WORDS = {
    r"is a bert, which fills in words and continues no text: give a gpt": ["bert"],
    r"untold has no tokenizer: give --data": ["untold"],
    r"bytes\.h5 has another tokenizer than .*saved": ["saved", "--data", "bytes.h5"],
    r"the tokenizer has 257 tokens, the model of .*small 99": ["small", "--data", "bytes.h5"],
    r"--tokens=0 is below 1": ["saved", "--tokens", "0"],
    r"temperature=-1\.0 is below 0": ["saved", "--temperature", "-1"],
    r"temperature=nan is below 0 or no number": ["saved", "--temperature", "nan"],
    r"top_k=0 is below 1": ["saved", "--top-k", "0"],
    r"seed=-1 is not in \[0, 2\^63\)": ["saved", "--seed", "-1"],
    r"seed=9223372036854775808 is not in": ["saved", "--seed", str(2**63)],
    r"there is no checkpoint .*nowhere": ["nowhere"],
    r"give logits of nan or inf": ["spoilt", "--data", "bytes.h5"],
}


@pytest.fixture(scope="module")
def others(trained):
    """Checkpoints that cannot continue a text, beside the one that can."""
    root = trained.root
    source = folder_of(root / "bert source", BERT_)
    import_model(source, root / "untold")
    (source / "tokenizer.json").write_text(BYTES.as_json())
    import_model(source, root / "bert")
    import_model(
        folder_of(root / "small source", GPT(layers=1, hidden=4, heads=1, vocabulary=99, positions=4)), root / "small"
    )
    put("transformer.wpe.weight", torch.full((19, 35), torch.nan))(folder_of(root / "spoilt source", GPT_))
    import_model(root / "spoilt source", root / "spoilt")
    return root


@pytest.mark.parametrize("message", WRONG_WORDS)
def test_what_cannot_be_continued_is_refused(message, others, monkeypatch, capsys):
    monkeypatch.chdir(others)
    assert main(["generate", *WRONG_WORDS[message]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_neither_mpi_nor_their_library_is_needed_to_go_on(trained):
    code = (
        "import sys; sys.modules.update(mpi4py=None, transformers=None); from chimera_mpi.cli import main\n"
        "sys.exit(main(['generate', 'saved', '--tokens', '3']) or main(['export', 'saved', '-o', 'without']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=trained.root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_their_tokenizer_knows_berts_tokens(hf, tmp_path):
    source = folder_of(tmp_path / "theirs", BERT_)
    (source / "tokenizer.json").write_text(BYTES.as_json())
    import_model(source, tmp_path / "ours")
    export_model(open_trained(tmp_path / "ours"), tmp_path / "exported")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
    assert tokenizer("ab", "é")["input_ids"] == [257, 97, 98, 258, *"é".encode(), 258]
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (259, 260)
    assert loaded(hf, tmp_path / "exported", BERT_).config.pad_token_id == 260


def test_learnt_ones_know_them_too(hf, tmp_path):
    own = learn(280, ["some words to learn from, some words"])
    source = folder_of(tmp_path / "theirs", BERT(layers=1, hidden=4, heads=1, vocabulary=300, positions=8))
    (source / "tokenizer.json").write_text(own.json)
    import_model(source, tmp_path / "ours")
    export_model(open_trained(tmp_path / "ours"), tmp_path / "exported")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
    assert tokenizer.cls_token_id == own.vocabulary and tokenizer.pad_token_id == own.vocabulary + 3


COMMAND = re.compile(r"^chimera-mpi (.*)$", re.MULTILINE)
PAGES = Path(__file__).parent.parent / "docs"


def test_the_commands_of_the_pages_run(trained, tmp_path, monkeypatch, capsys):
    """One after the other, in a folder with what they speak of."""
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "texts", "crawl/deep", "runs"):
        Path(folder).mkdir(parents=True)
    shutil.copy(trained.root / "text.txt", "notes.txt")
    shutil.copy(trained.root / "text.txt", "texts/one.md")
    Path("crawl/deep/a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "a text"}\n{"body": "another"}\n'))
    shutil.copytree(trained.root / "theirs", "gpt2")
    shutil.copytree(trained.root / "saved", "runs/checkpoints")
    for page in ("data.md", "huggingface.md"):
        commands = COMMAND.findall((PAGES / page).read_text())
        assert len(commands) > 4
        for command in commands:
            assert main(shlex.split(command)) == 0, command
    assert (
        "runs/gpt2-pretrained: the weights of a gpt of 2 layers, a tokenizer of 300 tokens" in capsys.readouterr().out
    )
