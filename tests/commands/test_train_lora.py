"""Training LoRAs for every kind of network, and sampling with them."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from checkpoint_making import FEW, make_classifier_file, make_file
from marks import slow
from script_running import run

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import WeightedLora, read_lora
from diff_dalle.commands.merge_lora import MergeConfig, merge_lora_files
from diff_dalle.commands.training_kinds import parse_lora
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.contract import weights_digest
from diff_dalle.recipes.lora import ClassifierLora
from diff_dalle.sampling.lora import LoraNetwork, parse_lora_paths, with_loras
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

TOKEN = '["[star]", "^circle</w>"]'
TOKENS = f"{TOKEN},^circle"
COMMON = {
    "iterations": 4,
    "batch_size": 4,
    "save_interval": 2,
    "log_interval": 1,
    "num_workers": 0,
    "lr": 0.05,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
    "ema_rate": 0.5,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of two worlds."""
    folder = tmp_path_factory.mktemp("shards")
    for name, seed in (("own", 0), ("prior", 1)):
        config = ShapesConfig(image_size=16, train_samples=24, val_samples=8, samples_per_shard=8, seed=seed)
        write_shapes(config, str(folder / name))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("base"))


def flags(base, shards, logdir, **changed) -> list[str]:
    given = {"model_path": base, "data_dir": shards / "own" / "train", "logdir": logdir, "train_tokens": TOKENS}
    given |= {**COMMON, "sample_interval": 0, **changed}
    return [str(part) for name, value in given.items() if value is not None for part in (f"--{name}", value)]


def train(base, shards, logdir, ranks=1, ok=True, **changed):
    return run("train_lora.py", *flags(base, shards, logdir, **changed), ranks=ranks, ok=ok)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, shards):
    folder = tmp_path_factory.mktemp("trained")
    train(base, shards, folder)
    return folder


@pytest.fixture(scope="module")
def lora(trained):
    return str(trained / "lora000004.safetensors")


def sample(path, prompts=("a [star]", "a red circle"), **options) -> np.ndarray:
    pipeline = diff_dalle.load(path, "cpu", **options)
    return pipeline.sample(list(prompts), sampler=FEW, progress=False).astype(int)


def test_the_run_keeps_the_adapters_alone(trained, base, lora):
    """Neither its checkpoints nor its optimizer know the base's weights."""
    content = load_file(str(trained / "model000004.pt"))
    names = content["state"]
    assert content["kind"] == "generator_lora" and all(name.startswith("lora.") for name in names)
    assert {name.rpartition(".")[2] for name in names} == {"lora_down", "lora_up", "deltas"}
    optimizer = load_file(str(trained / "opt000004.pt"), ("optimizer",))["state"]["optimizer"]
    assert sum(len(group["params"]) for group in optimizer["param_groups"]) == len(names) == len(optimizer["state"])
    assert content["tokenizer"] == open_network(base, "generator").tokenizer.identity + "+[star]"
    lora = read_lora(lora)
    network = open_network(base, "generator").load(torch.device("cpu"))
    assert lora.about.base == weights_digest(network.state_dict())
    assert (lora.about.kind, lora.about.rank, lora.about.train_tokens) == ("generator", 4, (TOKEN, "^circle"))
    averaged = load_file(str(trained / "ema_0.5_000004.pt"))["state"]
    assert all(torch.equal(value, averaged[f"lora.{name}"]) for name, value in lora.tensors.items())
    assert all(value.any() for value in lora.tensors.values())
    assert lora.deltas.any(1).tolist() == [True, False, False]  # no caption has circles or [star]


def test_the_base_has_no_gradient_and_is_not_in_training_mode(base, shards, tmp_path):
    run = parse_lora(flags(base, shards, tmp_path)).recipe().open(ALONE)
    data = run.both_loaders[0]
    (trainee,) = run.trainees(data)
    network = trainee.task.model.base
    before = {n: p.clone() for n, p in network.named_parameters() if "lora" not in n and "deltas" not in n}
    batch = data.batch_at(range(4))
    trainee.update([(batch, diff_dalle.randomness.Draw(0, batch.index, torch.device("cpu")))], 0)
    assert not network.training and len(before) > 50
    for name, parameter in network.named_parameters():
        if name in before:
            assert parameter.grad is None and not parameter.requires_grad and torch.equal(parameter, before[name])
    held = {id(p) for part in trainee.optimizations.values() for p in part.optimizer.state}
    assert held == {id(p) for p in trainee.task.model.parameters()}


@pytest.mark.parametrize("prior", [slow(None), slow("images"), "base"])
def test_processes_may_come_and_go(base, shards, tmp_path, prior):
    changed = {"save_interval": 1}
    if prior:
        changed |= {"prior_data_dir": shards / "prior" / "train", "prior_weight": 0.5, "prior_target": prior}
    for name, steps, ranks in (("one", 2, 1), ("moved", 1, 2), ("moved", 2, 1)):
        own = {**changed, "batch_size": 4 // ranks, "iterations": steps}
        train(base, shards, tmp_path / name, ranks=ranks, **own)
    one, moved = (load_file(str(tmp_path / name / "model000002.pt"))["state"] for name in ("one", "moved"))
    for name in one:
        torch.testing.assert_close(one[name], moved[name], rtol=1e-3, atol=1e-4)


def test_half_of_a_batch_are_regularization_images(base, shards, tmp_path):
    prior = shards / "prior" / "train"
    own = parse_lora(flags(base, shards, tmp_path))
    both = parse_lora(flags(base, shards, tmp_path, prior_data_dir=prior, prior_weight=0.25))
    other = parse_lora(flags(base, shards, tmp_path, data_dir=prior))
    loaders = [run.recipe().open(ALONE).both_loaders[0] for run in (own, both, other)]
    expected, mixed, priors = (next(loader.batches(0)) for loader in loaders)
    assert mixed.weight.tolist() == [1, 1, 0.25, 0.25]
    assert torch.equal(mixed.images, torch.cat([expected.images[:2], priors.images[:2]]))


def test_sampling_with_the_file_equals_sampling_with_the_merged_checkpoint(lora, base, tmp_path):
    merged = str(tmp_path / "merged.pt")
    out = run("merge_lora.py", "--model_path", base, "--lora", f"{lora}:0.7", "--out", merged).stdout
    assert merged in out
    with pytest.raises(InputError, match=r"merged\.pt exists already: give another file with --out"):
        merge_lora_files(MergeConfig(base, (lora,), out=merged))
    with pytest.raises(InputError, match="lora is required"):
        MergeConfig(base)
    with_file, plain = sample(base, lora=f"{lora}:0.7"), sample(base)
    assert np.array_equal(sample(merged), with_file)
    assert np.abs(with_file - plain).max() > 3
    assert open_network(merged, "generator").tokenizer.identity.endswith("+[star]")


def test_a_checkpoint_of_the_run_serves_as_its_file(trained, base, lora):
    assert np.array_equal(sample(base, lora=lora), sample(base, lora=str(trained / "ema_0.5_000004.pt")))


def test_a_factor_may_follow_the_path(lora, tmp_path):
    (tmp_path / "a:b").mkdir()
    colon = shutil.copy(lora, f"{tmp_path}/a:b/x.safetensors")
    found = parse_lora_paths([lora, f"{lora}:0.7", f"{lora}:-2", colon])
    assert [(each.lora.path, each.weight) for each in found] == [(lora, 1), (lora, 0.7), (lora, -2), (colon, 1)]
    for factor in ("nan", "inf"):
        with pytest.raises(InputError, match="but the factor must be a finite number"):
            parse_lora_paths([f"{lora}:{factor}"])


@pytest.fixture(scope="module")
def changed(tmp_path_factory, base):
    """The base with other weights."""
    content = load_file(base)
    content["state"]["unet.out_conv.bias"] = content["state"]["unet.out_conv.bias"] + 1
    path = str(tmp_path_factory.mktemp("changed") / "changed.pt")
    torch.save(content, path)
    return path


def test_a_lora_goes_to_the_base_that_it_was_trained_for(lora, base, changed):
    with pytest.raises(InputError, match=r"4.safetensors was trained for a generator with the weights \w+, but"):
        sample(changed, lora=lora)
    assert sample(changed, lora=lora, accept_changed_base=True).shape == (2, 16, 16, 3)
    with pytest.raises(InputError, match=r"the token \[star\] exists already"):
        sample(base, lora=[lora, lora])


def test_a_lora_finds_its_network_among_several(lora, base, changed):
    (given,) = parse_lora_paths([lora])
    own, other = (open_network(path, "generator") for path in (base, changed))
    found = with_loras([other, own], [given])
    assert found[0] is other and isinstance(found[1], LoraNetwork) and found[1].plain is own
    with pytest.raises(InputError, match="fits 2 networks here, none of which it was trained for"):
        with_loras([other, other], [given], accept_changed_base=True)
    about = dataclasses.replace(given.lora.about, kind="classifier")
    foreign = WeightedLora(dataclasses.replace(given.lora, about=about))
    with pytest.raises(InputError, match="was trained for a classifier, which is not among the networks here"):
        with_loras([own], [foreign], accept_changed_base=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"alpha": 0}, "alpha is 0, but must be above 0"),
        ({"base_weights": "0123"}, "but --base_weights says 0123"),
        ({"batch_size": 3, "prior_data_dir": "x"}, "batch_size is 3, but must be even"),
        ({"prior_weight": -1, "prior_data_dir": "x"}, "prior_weight is -1, but must be at least 0"),
        ({"prior_target": "base"}, "--prior_target has no effect while prior_data_dir is none"),
        (
            {"prior_target": "base", "prior_data_dir": "x", "loss_type": "kl"},
            "prior_target is base, but --loss_type kl compares distributions, not predictions: set it to images",
        ),
        ({"parallel": "fsdp"}, "parallel is fsdp, but the base of a LoRA is on every process as a whole"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(base, shards, tmp_path, changed, words):
    """Beside those whose messages ``record`` holds."""
    result = train(base, shards, tmp_path, ok=False, **changed)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert re.search(words, result.stderr), result.stderr


def test_a_contrastive_loss_has_no_regularization_images():
    with pytest.raises(
        InputError, match="prior_data_dir is set, but a contrastive loss has no weights of samples: leave"
    ):
        ClassifierLora(model_path="base.pt", prior_data_dir=("prior",))


def test_tokens_that_no_caption_has_are_told_and_alone_refused(base, shards, tmp_path, caplog):
    """The worlds have circles, and no star."""

    def opened(tokens, **changed):
        session = parse_lora(flags(base, shards, tmp_path, train_tokens=tokens, **changed)).recipe().open(ALONE)
        return session.both_loaders

    opened("^circle")
    assert "train_tokens" not in caplog.text
    opened(TOKENS, prior_data_dir=shards / "prior" / "train")
    assert re.search(r"train_tokens has \[star\], but none of 24 captions, of \d+ tokens at most, does", caplog.text)
    opened(TOKENS, module_filters="none")
    with pytest.raises(InputError, match=r"has \[star\], but none of 24 captions.*nothing would be trained"):
        opened(TOKEN, module_filters="none")


def test_a_lora_may_start_from_another(lora, base, shards, tmp_path):
    train(base, shards, tmp_path / "on", lora_checkpoint_path=lora, iterations=1, lr=1e-9, ema_rate="none")
    begun, given = read_lora(str(tmp_path / "on" / "lora000001.safetensors")), read_lora(lora)
    assert all(torch.allclose(begun.tensors[name], value, atol=1e-6) for name, value in given.tensors.items())
    result = train(base, shards, tmp_path / "off", lora_checkpoint_path=lora, rank=2, ok=False)
    assert result.returncode == 2 and "has another rank than this run" in result.stderr


@pytest.mark.parametrize(("given", "alpha"), [({}, 1.0), ({"alpha": 2}, 2.0)])
def test_the_published_recipe_is_one_key(base, shards, tmp_path, given, alpha):
    settings = parse_lora(flags(base, shards, tmp_path, lora_recipe="published", **given))
    assert settings.alpha == alpha and settings.lora_recipe == "published"
    state = settings.recipe().open(ALONE).network().state_dict()
    for name, value in state.items():
        assert not name.endswith(("down", "up")) or value.any() == name.endswith("up")


def test_a_lora_may_start_from_that_of_another_base_if_told_so(lora, changed, shards, tmp_path):
    def model(**options):
        settings = parse_lora(flags(changed, shards, tmp_path, lora_checkpoint_path=lora, **options))
        return settings.recipe().open(ALONE).network()

    with pytest.raises(InputError, match="has another base than this run: .*, or accept the other base by accept_ch"):
        model()
    state = model(accept_changed_base=True).state_dict()
    assert all(torch.equal(state[f"lora.{name}"], value) for name, value in read_lora(lora).tensors.items())


def test_a_classifier_is_adapted(tmp_path, shards):
    base = make_classifier_file(tmp_path)
    own = {"sample_interval": None, "module_filters": "tower", "lr_anneal_steps": 0, "warmup_steps": 0}
    train(base, shards, tmp_path / "run", **own)
    path, merged = str(tmp_path / "run" / "lora000004.safetensors"), str(tmp_path / "merged.pt")
    lora = read_lora(path)
    assert lora.about.kind == "classifier" and any(name.startswith("text_tower") for name in lora.pairs)
    run("merge_lora.py", "--model_path", base, "--lora", path, "--out", merged)
    old, new = (diff_dalle.load_classifier(each, "cpu") for each in (base, merged))
    assert not torch.allclose(old.encode_text(["a circle"]), new.encode_text(["a circle"]), atol=1e-3)
    assert new.tokenizer.vocab_size == old.tokenizer.vocab_size + 1
    assert dataclasses.asdict(old.config) == dataclasses.asdict(new.config)
