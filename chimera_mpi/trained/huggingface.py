"""Folders as Hugging Face's `transformers` reads and writes them: config.json, safetensors, tokenizer.json.

Nothing in them is run: weights are read from safetensors only, and never from a pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checkpoint import PART, WEIGHTS, Checkpoint, Draft, open_checkpoint
from ..data import TOKENIZER, Tokenizer, from_json, name_of, special_tokens
from ..errors import InputError, refuse_taken, refusing, unwritable
from ..models import (
    BERT,
    GPT,
    SHAPE,
    from_huggingface,
    from_huggingface_config,
    to_huggingface,
    to_huggingface_config,
)
from .model import Trained

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COPIES = ("lm_head.weight", "cls.predictions.decoder.weight")  # of the embedding, where weights are tied
SEGMENTS = 2  # of a sample that trains a BERT
NAMES = ("cls_token", "sep_token", "mask_token", "pad_token")


class Imported(NamedTuple):
    checkpoint: Checkpoint
    shape: GPT | BERT
    tokenizer: Tokenizer | None


class Exported(NamedTuple):
    folder: Path
    files: tuple[str, ...]


# ---- into a checkpoint -------------------------------------------------------------------------------------------


def import_model(source: Path, output: Path) -> Imported:
    """Make the checkpoint `output`, of weights only, of a folder or of one safetensors file in it.

    The folder has a config.json and perhaps a tokenizer.json, and its weights in one file or in several with an index.
    Half precision becomes float32. Raises InputError, and then leaves nothing.
    """
    folder = source if os.path.isdir(source) else source.parent
    refuse_taken(output)
    weights = _weights_in(source)
    with _named(folder / CONFIG):
        shape = from_huggingface_config(_settings(folder / CONFIG))
        if isinstance(shape, BERT) and shape.segments != SEGMENTS:
            raise InputError(f"type_vocab_size={shape.segments}, and samples have {SEGMENTS} segments here")
    with _named(source):
        layers = from_huggingface(shape, weights)
    tokenizer = _tokenizer_in(folder, shape)
    facts = _facts(shape, tokenizer, source)
    with _made(output) as part:
        draft = Draft(part, 0)
        states = {index: {WEIGHTS + name: w for name, w in layers[index].items()} for index in sorted(layers)}
        files = {index: draft.write(index, state) for index, state in states.items()}
        draft.commit(files, facts, keep=1, since=0, attached=tokenizer.files if tokenizer else {}).rename(output)
    return Imported(open_checkpoint(output), shape, tokenizer)


def _facts(shape: GPT | BERT, tokenizer: Tokenizer | None, source: Path) -> dict[str, Any]:
    """What a run must have in common with it, and what any checkpoint says."""
    model = {
        "model": "bert" if isinstance(shape, BERT) else "gpt",
        **{key: value for key, value in asdict(shape).items() if key in SHAPE},
    }
    return {
        "weights_only": True,
        "identity": model,
        "config": model,
        "source": source.resolve().name,
        "tokenizer": tokenizer.facts if tokenizer else None,
        "loss_scale": None,
        "log": None,
        "versions": {package: version(package) for package in ("chimera-mpi", "torch", "safetensors")},
    }


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"there is no {CONFIG}, which says what the weights are of: give a folder that has it")
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise InputError(f"it is a {type(found).__name__}, not an object")
    return found


def _weights_in(source: Path) -> dict[str, torch.Tensor]:
    if os.path.isdir(source):
        return _weights_in_folder(source)
    if source.suffix in PICKLES:
        raise InputError(_pickled(source))
    if not os.path.isfile(source):
        raise InputError(f"there is no {source}: give a folder with {CONFIG} and safetensors, or one such file")
    if source.suffix != ".safetensors":
        raise InputError(f"{source} is no safetensors file: give a folder or a FILE.safetensors")
    return dict(_weights_of(source))


def _weights_in_folder(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / INDEX).is_file():
        return _weights_by_index(folder)
    found = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return dict(_weights_of(found[0]))
    if found:
        raise InputError(f"{folder} has {len(found)} safetensors files and no {INDEX}: give one of them")
    pickles = [path for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise InputError(_pickled(pickles[0]))
    raise InputError(f"{folder} has no safetensors file: give a folder with {CONFIG} and {WHOLE}")


def _pickled(path: Path) -> str:
    return (
        f"{path} is a pickle, which may run anything when it is loaded, and is not: "
        "save the weights as safetensors, as save_pretrained does"
    )


def _weights_by_index(folder: Path) -> dict[str, torch.Tensor]:
    """Each weight from the file that the index names, of which none has others."""
    with refusing(f"{folder / INDEX} is not understood"):
        found_places = dict(json.loads((folder / INDEX).read_bytes())["weight_map"])
        places = {name: str(place) for name, place in found_places.items()}
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{folder / INDEX} names {name!r}: its files are safetensors beside it")
        found = dict(_weights_of(folder / name))
        listed = {weight for weight, place in places.items() if place == name}
        if found.keys() != listed:
            odd = min(found.keys() ^ listed)
            raise InputError(f"{folder / name} and {INDEX} differ in '{odd}': give the files that belong together")
        weights.update(found)
    return weights


def _weights_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not path.is_file():
        raise InputError(f"there is no {path}: its index names it")
    with refusing(f"{path} is no whole safetensors file"), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            yield name, weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight


def _tokenizer_in(folder: Path, shape: GPT | BERT) -> Tokenizer | None:
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    with refusing(f"{path} cannot be read"):
        tokenizer = from_json(path.read_text(encoding="utf-8"), str(path))
    if tokenizer.vocabulary > shape.vocabulary:
        raise InputError(
            f"{path} has {tokenizer.vocabulary} tokens, the model {shape.vocabulary}: give those that belong together"
        )
    return tokenizer


# ---- out of one --------------------------------------------------------------------------------------------------


def export_model(trained: Trained, output: Path) -> Exported:
    """Make the folder `output`, as `from_pretrained` loads it. Raises InputError, and then leaves nothing."""
    refuse_taken(output)
    shape = trained.shape
    weights = to_huggingface(shape, dict(trained.weights()))
    if shape.tied:
        weights = {name: weight for name, weight in weights.items() if name not in COPIES}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    texts = {CONFIG: {**to_huggingface_config(shape), "dtype": dtype, **_numbers(trained)}, **_tokenizer_files(trained)}
    with _made(output) as part:
        made = part / output.name
        made.mkdir()
        for name, text in texts.items():
            content = text if isinstance(text, str) else json.dumps(text, indent=2) + "\n"
            (made / name).write_text(content, encoding="utf-8")
        save_file(weights, made / WHOLE, metadata={"format": "pt"})
        made.rename(output)
    return Exported(output, (*texts, WHOLE))


def _numbers(trained: Trained) -> dict[str, int | None]:
    """Of the tokens that transformers itself wants to know: its own are those of a vocabulary of 50257 or 30522."""
    tokenizer = trained.tokenizer
    end = tokenizer.end_of_document if tokenizer else None
    if isinstance(trained.shape, BERT):
        own = tokenizer and (tokenizer.specials or special_tokens(tokenizer.vocabulary))
        return {"pad_token_id": own.pad if own else None}
    return {"bos_token_id": end, "eos_token_id": end}


def _tokenizer_files(trained: Trained) -> dict[str, Any]:
    tokenizer = trained.tokenizer
    if tokenizer is None:
        return {}
    is_bert = isinstance(trained.shape, BERT)
    text = tokenizer.as_json(special_tokens(tokenizer.vocabulary) if is_bert else None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": trained.shape.positions,
        "clean_up_tokenization_spaces": False,
    }
    own = tokenizer.specials or special_tokens(tokenizer.vocabulary)
    numbers = dict(zip(NAMES, own, strict=True)) if is_bert else {"eos_token": tokenizer.end_of_document}
    named = {key: name_of(text, number) for key, number in numbers.items()}
    return {TOKENIZER: text, "tokenizer_config.json": {**settings, **named}}


# ---- files -------------------------------------------------------------------------------------------------------


@contextmanager
def _made(output: Path) -> Iterator[Path]:
    """A folder beside `output` to make it in, which goes. What the disk refuses becomes an InputError."""
    part = output.with_name(f".{output.name}.{os.getpid()}{PART}")
    try:
        part.mkdir(parents=True)
        yield part
    except SafetensorError as error:
        raise unwritable(output, OSError(str(error))) from error
    except OSError as error:
        raise unwritable(output, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with it begins with its name."""
    try:
        with refusing("it is not understood"):
            yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
