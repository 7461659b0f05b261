"""LoRAs in a network's weights, and out of them again."""

import dataclasses

import pytest
import torch
from checkpoint_making import make_file, sample
from script_running import run

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import LoraAbout, write_lora
from diff_dalle.commands.merge_lora import MergeConfig, merge_lora_files, merged_loras
from diff_dalle.config import InputError
from diff_dalle.embeddings.contract import weights_digest
from diff_dalle.models.adapters.lora import Adapted
from diff_dalle.text.trained_tokens import find_tokens, parse_token

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base and two LoRAs, each with a new token and with changes of the same existing one."""
    folder = tmp_path_factory.mktemp("files")
    digest = weights_digest(open_network(make_file(folder), "generator").load(CPU).state_dict())
    for seed, name in enumerate(("star", "dog")):
        about = LoraAbout(
            "generator", "", digest, 2, 3.0, ("mlp_in",), (f'["[{name}]", "^circle</w>"]', "^triangle</w>")
        )
        shapes = {"lora_down": (2, 16), "lora_up": (64, 2)}
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"text_encoder.blocks.0.mlp_in.{k}": torch.randn(s, generator=generator) for k, s in shapes.items()}
        tensors["tokens.deltas"] = torch.randn(2, 16, generator=generator)
        with open(folder / f"{name}.safetensors", "wb") as file:
            write_lora(file, about, tensors)
    return folder


def merge(folder, out, *loras, base="ema.pt", **options) -> dict:
    paths = tuple(str(folder / name) for name in loras)
    merge_lora_files(MergeConfig(str(folder / base), paths, out=str(folder / out), **options))
    return load_file(str(folder / out))


def test_what_is_removed_leaves_no_trace_but_rounding(folder):
    both = merge(folder, "both.pt", "star.safetensors:0.5", "dog.safetensors")
    dog = merge(folder, "dog.pt", "dog.safetensors")
    flags = ["--model_path", folder / "both.pt", "--lora", f"{folder}/star.safetensors:0.5", "--remove", True]
    run("merge_lora.py", *flags, "--out", folder / "rest.pt")
    rest, base = load_file(str(folder / "rest.pt")), load_file(str(folder / "ema.pt"))
    none = merge(folder, "none.pt", "dog.safetensors", base="rest.pt", remove=True)
    for found, expected in ((rest, dog), (none, base)):
        assert found["tokenizer"] == expected["tokenizer"] and found["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-5)
        assert found["config"] == expected["config"]
    assert none["vocabulary"] == base["vocabulary"]
    assert not torch.allclose(*(each["state"]["text_encoder.blocks.0.mlp_in.weight"] for each in (both, dog)))
    images = [sample(diff_dalle.load(str(folder / name), "cpu"), ["a [dog]"]) for name in ("rest.pt", "dog.pt")]
    assert abs(images[0].astype(int) - images[1]).max() <= 1


def test_a_checkpoint_says_which_loras_it_has(folder):
    content = merge(folder, "said.pt", "star.safetensors:0.5")
    (entry,) = merged_loras(content["config"])
    assert (entry["file"], entry["factor"]) == ("star.safetensors", 0.5)
    assert merged_loras({"merged_loras": 3}) == merged_loras({"merged_loras": [4, {}]}) == []
    for lora in ("star.safetensors", "dog.safetensors:0.5"):  # another factor, another file
        with pytest.raises(
            InputError, match=r"is not among the LoRAs that .*said\.pt says it has \(star.safetensors:0.5"
        ):
            merge(folder, "no.pt", lora, base="said.pt", remove=True)
    with pytest.raises(InputError, match=r"dog.safetensors: it adds \[dog\], which the network does not have"):
        merge(folder, "no.pt", "dog.safetensors", base="said.pt", remove=True, accept_changed_base=True)
    assert not (folder / "no.pt").exists()


def test_an_added_token_can_be_trained_again(folder):
    """It begins as it is; patterns that find other tokens do not find it."""
    merge(folder, "again.pt", "star.safetensors")
    saved = open_network(str(folder / "again.pt"), "generator")
    network = saved.load(CPU)
    found = find_tokens(saved.tokenizer, [parse_token("^.star.$")])
    star = saved.tokenizer.token_id("[star]")
    assert found.ids == (star,) and found.sources == ((star,),) and found.tokenizer.identity == saved.tokenizer.identity
    assert star not in find_tokens(saved.tokenizer, [parse_token("star")]).ids
    tokens, mask = saved.tokenizer(["a [star]"], 12)
    before = network.text_encoder(tokens, mask)[0]
    adapted = Adapted(network, ("mlp_in",), 2, 2.0, found)
    torch.testing.assert_close(network.text_encoder(tokens, mask)[0], before)
    network.text_encoder(tokens, mask)[0].sum().backward()
    assert adapted.lora.tokens.deltas.grad.any()


def test_patterns_find_nothing_that_another_lora_adds(folder):
    tokenizer = open_network(str(folder / "ema.pt"), "generator").tokenizer
    extended = tokenizer.extended(["[star]"])
    with pytest.raises(InputError, match="finds no token"):
        find_tokens(extended, [parse_token("^.star.$")], tokenizer)
    assert dataclasses.replace(tokenizer.vocabulary, added=("[star]",)) == extended.vocabulary
    assert extended.without(["[star]"]).identity == tokenizer.identity
