"""The same weights under Hugging Face's names: there and back, and in its own models the same logits."""

import json

import pytest
import torch

from chimera_mpi.errors import InputError
from chimera_mpi.models import (
    BERT,
    GPT,
    bert,
    from_huggingface,
    from_huggingface_config,
    gpt,
    make_layer,
    to_huggingface,
    to_huggingface_config,
)

SHAPE = {"layers": 3, "hidden": 24, "heads": 4, "vocabulary": 31, "positions": 12}
CONFIGS = [kind(**SHAPE, tied=tied) for kind in (GPT, BERT) for tied in (True, False)]
KIND_AND_TIED = [f"{type(config).__name__}-{'tied' if config.tied else 'untied'}" for config in CONFIGS]

each_config = pytest.mark.parametrize("config", CONFIGS, ids=KIND_AND_TIED)


def build(config) -> torch.nn.ModuleList:
    """Random layers in float64, far from their start; tied parameters are equal."""
    model = gpt(config) if isinstance(config, GPT) else bert(config)
    layers = torch.nn.ModuleList(make_layer(model, index, 0, torch.float64) for index in range(len(model.layers)))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for (owner, owner_name), *copies in model.tied:
            for layer, name in copies:
                layers[layer].get_parameter(name).copy_(layers[owner].get_parameter(owner_name))
    return layers.eval()


def weights_of(config):
    return {index: layer.state_dict() for index, layer in enumerate(build(config))}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for layer in wanted:
        assert found[layer].keys() == wanted[layer].keys()
        assert all(torch.equal(found[layer][name], wanted[layer][name]) for name in wanted[layer])
        assert all(weight.is_contiguous() for weight in found[layer].values())


@each_config
def test_there_and_back(config):
    weights = weights_of(config)
    theirs = to_huggingface(config, weights)
    assert_same(from_huggingface(config, theirs), weights)
    places = [weight.data_ptr() for named in weights.values() for weight in named.values()]
    assert len({*places, *(weight.data_ptr() for weight in theirs.values())}) == len(places) + len(theirs)


@each_config
def test_configurations_there_and_back(config):
    assert from_huggingface_config(json.loads(json.dumps(to_huggingface_config(config)))) == config


def test_weights_as_they_are_published():
    """OpenAI's without prefix, with its causal masks and without a head; Google's with gamma and beta."""
    weights = weights_of(CONFIGS[0])
    theirs = {name.removeprefix("transformer."): w for name, w in to_huggingface(CONFIGS[0], weights).items()}
    del theirs["lm_head.weight"]
    theirs["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    assert_same(from_huggingface(CONFIGS[0], theirs), weights)

    weights = weights_of(CONFIGS[2])
    theirs = to_huggingface(CONFIGS[2], weights)
    del theirs["cls.predictions.decoder.weight"], theirs["cls.predictions.decoder.bias"]
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        theirs = {name.replace(new, old): weight for name, weight in theirs.items()}
    theirs["bert.embeddings.position_ids"] = torch.arange(12)
    assert_same(from_huggingface(CONFIGS[2], theirs), weights)


@each_config
def test_wrong_weights_are_refused_by_name(config):
    theirs = to_huggingface(config, weights_of(config))
    name = next(name for name in theirs if "position" in name or "wpe" in name)
    with pytest.raises(InputError, match=f"no weights '{name}'"):
        from_huggingface(config, {n: weight for n, weight in theirs.items() if n != name})
    with pytest.raises(InputError, match=r"no place .* 1 weights, such as .*extra'"):
        from_huggingface(config, {**theirs, "extra": torch.ones(1)})
    with pytest.raises(InputError, match=r"layer 0 is \[99, 24\].* asks for \[12, 24\]"):
        from_huggingface(config, {**theirs, name: torch.ones(99, 24)})
    with pytest.raises(InputError, match=r"no place .* such as .*\.2\."):
        from_huggingface(type(config)(**{**SHAPE, "layers": 2}, tied=config.tied), theirs)
    with pytest.raises(InputError, match=r"layer 2 has no weights .*all 5 layers"):
        to_huggingface(config, {layer: named for layer, named in weights_of(config).items() if layer != 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type=llama"),
        ({"hidden_act": "relu"}, "hidden_act=relu.*hidden_act=gelu"),
        ({"intermediate_size": 99}, "intermediate_size=99.*=96"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps"),
    ],
)
def test_models_that_are_not_built_here_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_huggingface_config({**to_huggingface_config(CONFIGS[2]), **change})


def test_a_configuration_that_lacks_a_size_is_refused():
    with pytest.raises(InputError, match="lacks n_layer, n_head"):
        from_huggingface_config(
            {"model_type": "gpt2", "n_embd": 8, "vocab_size": 9, "n_positions": 4, "resid_pdrop": 0}
        )


# ---- against transformers itself ---------------------------------------------------------------------------------


def theirs_of(config, layers):
    """Hugging Face's module with our weights, all of which it knows."""
    transformers = pytest.importorskip("transformers")
    settings = to_huggingface_config(config)
    of_config, of_model = (
        (transformers.GPT2Config, transformers.GPT2LMHeadModel)
        if isinstance(config, GPT)
        else (transformers.BertConfig, transformers.BertForPreTraining)
    )
    module = of_model(of_config(**settings)).double().eval()
    weights = to_huggingface(config, {index: layer.state_dict() for index, layer in enumerate(layers)})
    module.load_state_dict(weights, strict=True)
    assert_same(from_huggingface(config, module.state_dict()), {i: la.state_dict() for i, la in enumerate(layers)})
    assert from_huggingface_config(module.config.to_dict()) == config
    return module


def run(layers, *tensors):
    for layer in layers:
        output = layer(*tensors)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


@pytest.mark.parametrize("config", CONFIGS[:2], ids=KIND_AND_TIED[:2])
def test_gpt_has_the_logits_of_gpt2(config):
    layers = build(config)
    theirs = theirs_of(config, layers)
    ids = torch.randint(31, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(run(layers, ids)[0], theirs(ids).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", CONFIGS[2:], ids=KIND_AND_TIED[2:])
def test_bert_has_the_logits_and_the_loss_of_bert_for_pre_training(config, padded):
    layers = build(config)
    theirs = theirs_of(config, layers)
    ids, segments = torch.randint(31, (3, 12)), torch.randint(2, (3, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [9], [5]]),) if padded else ()
    words = torch.full((3, 12), -100)
    words[:, 1:3] = torch.randint(31, (3, 2))
    targets = words, torch.tensor([0, 1, 1])
    with torch.no_grad():
        found = run(layers, ids, segments, *mask)
        wanted = theirs(
            input_ids=ids,
            token_type_ids=segments,
            attention_mask=mask[0].long() if padded else None,
            labels=targets[0],
            next_sentence_label=targets[1],
        )
    torch.testing.assert_close(found[0], wanted.prediction_logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], wanted.seq_relationship_logits, rtol=0, atol=1e-10)
    loss, count = bert(config).loss(*found, targets)
    torch.testing.assert_close(loss / count, wanted.loss, rtol=1e-12, atol=0)
