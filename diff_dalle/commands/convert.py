"""What ``convert.py`` does: checkpoints of other projects become ours, and ours theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from .. import storage
from ..checkpoints.checkpoint import load_file, read_foreign, write_file
from ..checkpoints.decoder import DecoderConfig
from ..checkpoints.foreign.dalle2_pytorch import VERSION, decoder_content, decoder_state, is_decoder, unet_state
from ..checkpoints.foreign.glide_clip import HEAD_CHANNELS, clip_content, clip_states, command, half_of
from ..checkpoints.foreign.layouts import find_layout
from ..checkpoints.foreign.names import Weight, names_table
from ..checkpoints.foreign.reading import check_layout, check_no_class, content_of, recognize, state_of
from ..checkpoints.foreign.stable_cascade import lora_state, network_states
from ..checkpoints.foreign.structure import is_unet
from ..checkpoints.loading import SavedNetwork, open_network, open_networks
from ..checkpoints.lora_file import Lora, lora_at
from ..checkpoints.safetensors import write_safetensors
from ..config import MAX_TEXT, InputError, from_dict, load_mapping
from ..distributed.devices import without_values
from ..evaluation.report import markdown_table
from ..models.decoder.unet import DecoderUnet
from ..models.latent.stages import StageC
from ..text.tokenizer import load_tokenizer
from .file_settings import SAFETENSORS, ConvertConfig
from .gathering import adapter_clip, check_new

SAID = "a checkpoint of ours says it"
CASCADE = ("stage_a", "semantic", "stage_b", "stage_c", "stage_c_controlnet")  # kinds with a place in Stable Cascade
CPU = torch.device("cpu")
#: Of the formats of U-Nets and CLIPs: the project, and the kinds that it has.
_LAYOUTS = {
    "original": ("Diff-DALLE", ("generator", "classifier")),
    "guided_diffusion": ("Guided-Diffusion", ("generator", "noisy_classifier", "vit_clip")),
    "unet": ("Guided-Diffusion", ("generator",)),
}
_VOCABULARIES = {"gpt2": "GPT-2's merge file, vocab.bpe,", "clip": "CLIP's, bpe_simple_vocab_16e6.txt.gz or clip,"}


def convert(config: ConvertConfig) -> str:
    """Write the file; returns a text about it. InputError for a file that cannot be converted, and for an existing
    ``out``."""
    check_new(config.out)
    if config.to == "dalle2_pytorch":
        return _to_decoder(config)
    if config.to == "stable_cascade":
        return _to_cascade(config)
    if config.to != "diff_dalle":
        return _to_others(config)
    content, text = _from_others(config)
    with _writer(config.out, content["state"]) as file:
        write_file(file, content)
    return f"{config.out}: {config.model_path} {text}"


def _from_others(config: ConvertConfig) -> tuple[dict[str, Any], str]:
    """The content of a checkpoint of ours, and what the file is taken for."""
    state = read_foreign(config.model_path)
    if half_of(state):
        return _from_clip(config, state)
    config.refuse(["text_path"], f"{config.model_path} is no half of GLIDE's noised CLIP")
    if not is_decoder(state):
        config.refuse(["decoder_config"], f"{config.model_path} is no decoder of DALLE2-pytorch")
    if not is_unet(state):
        config.refuse([*config.given, "bpe_path"], f"has no effect on {config.model_path}")
        return _of_layout(config, state)
    found = recognize(state, config.model_path, config.given)
    content = content_of(found, state, config.model_path)
    if not found.structure.text:
        config.refuse(["bpe_path"], f"{config.model_path} reads no text")
        return content, str(found)
    if not config.bpe_path:
        raise InputError(f"{config.model_path} reads text: give {_VOCABULARIES[found.vocabulary]} with --bpe_path")
    vocabulary = _vocabulary(config, config.model_path, found.vocab_size, found.vocab_size)
    return content | vocabulary, str(found)


def _from_clip(config: ConvertConfig, image: Mapping[str, Tensor]) -> tuple[dict[str, Any], str]:
    """Of both halves of GLIDE's noised CLIP."""
    if not config.text_path or not config.bpe_path:
        raise InputError(f"{config.model_path} is half of GLIDE's noised CLIP: run {command(image, config.model_path)}")
    config.refuse(config.given.keys() - {"num_head_channels"}, f"has no effect on {config.model_path}")
    channels = HEAD_CHANNELS if config.num_head_channels is None else config.num_head_channels
    paths = config.model_path, config.text_path
    content = clip_content(image, read_foreign(config.text_path), paths, channels)
    content |= _vocabulary(config, config.text_path, 0, content["config"]["model"]["token_rows"])
    return content, f"and {config.text_path}, GLIDE's noised CLIP, {channels} channels a head"


def _vocabulary(config: ConvertConfig, path: str, least: int, most: int) -> dict[str, str]:
    """What a checkpoint says about its tokenizer. least, most: tokens that fit the weights in ``path``."""
    tokenizer = load_tokenizer(config.bpe_path)
    if not least <= tokenizer.vocab_size <= most:
        raise InputError(
            f"{path} knows {most} tokens, but the vocabulary of --bpe_path {config.bpe_path} has {tokenizer.vocab_size}"
        )
    return {"tokenizer": tokenizer.identity, "vocabulary": tokenizer.vocabulary.text()}


def _of_layout(config: ConvertConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], str]:
    """Of a file that is no U-Net of Guided-Diffusion's kind."""
    if config.decoder_config:
        mapping = load_mapping(storage.read_text(config.decoder_config, MAX_TEXT), config.decoder_config)
        decoder = from_dict(DecoderConfig, mapping.get("decoder", mapping), config.decoder_config)
        return decoder_content(state, config.model_path, decoder, config.unet)
    layout = find_layout(state)
    assert layout is not None  # of weights that were found by it
    return layout.content(state, config.model_path)


def _to_others(config: ConvertConfig) -> str:
    config.refuse(config.given.keys() - {"use_new_attention_order"}, SAID)
    project, kinds = _LAYOUTS[config.to]
    (saved,) = open_networks(config.model_path, kinds, config.bpe_path)
    if saved.settings.name == "vit_clip":
        return _to_clip(config, saved)
    order, original = bool(config.use_new_attention_order), config.to == "original"
    if config.to == "unet":
        if saved.settings.model.is_upsampler:
            raise InputError(f"{config.model_path} is an upsampler, but `unet` is for base generators")
    elif original or saved.settings.name == "generator":
        check_layout(saved.settings.model, config.model_path, original)
    network = saved.load(CPU)
    if saved.settings.name == "generator" and saved.settings.denoising.caption_dropout and not config.drop_no_class:
        check_no_class(network, config.model_path)  # of those that never dropped it, it is no more than random
    text = f"{config.out}: {config.model_path} in the layout of {project}"
    state = state_of(network, config.model_path, original, order)
    if config.to == "unet":
        table = names_table(network, order)
        state = {name: state[name] for name in table}
        names = f"{config.out.removesuffix(SAFETENSORS)}_names.md"
        storage.write_bytes(names, table_text(table).encode())
        text += f"\n{names}: the names here and there"
    _write(config.out, state, "original" if original else "guided_diffusion")
    return text


def _to_clip(config: ConvertConfig, saved: SavedNetwork) -> str:
    """As both halves of GLIDE's noised CLIP."""
    given = [name for name in ("use_new_attention_order", "drop_no_class") if getattr(config, name)]
    config.refuse(given, f"has no effect on {config.model_path}")
    stem, dot, ending = config.out.rpartition(".")
    paths = config.out, f"{stem}_text{dot}{ending}" if dot else f"{config.out}_text"
    check_new(paths[1])
    for path, state in zip(paths, clip_states(saved.load(CPU), config.model_path), strict=True):
        _write(path, state, "guided_diffusion")
    return f"{', '.join(paths)}: {config.model_path} as GLIDE's image and text encoder"


def _to_decoder(config: ConvertConfig) -> str:
    config.refuse([*config.given, "bpe_path"], SAID)
    networks = open_networks(config.model_path, ("decoder",))
    loaded = {each.trainee: cast(DecoderUnet, each.load(CPU)) for each in networks}
    decoder = networks[0].settings.decoder
    if len(loaded) == len(decoder):
        state = decoder_state({i: loaded[name] for i, name in enumerate(decoder.names)}, decoder, config.model_path)
        content = {"model": state, "version": VERSION, "step": load_file(config.model_path)["step"]}
    else:
        ((name, network),) = loaded.items()
        content = state = unet_state(network, decoder.named(name), config.model_path)
    with _writer(config.out, state) as file:
        torch.save(content, file)
    what = "a decoder" if "model" in content else "a U-Net"
    return f"{config.out}: {config.model_path} as {what} of DALLE2-pytorch"


def _to_cascade(config: ConvertConfig) -> str:
    config.refuse([*config.given, "bpe_path"], SAID)
    if (lora := lora_at(config.model_path)) is not None:
        return _lora_to_cascade(config, lora)
    config.refuse(["base"], f"{config.model_path} is no LoRA")
    (saved,) = open_networks(config.model_path, CASCADE)
    states, others = network_states(saved.load(CPU), saved.settings, config.model_path)
    stem = config.out.removesuffix(SAFETENSORS)
    paths = [config.out, f"{stem}_previewer{SAFETENSORS}"][: len(states)]
    check_new(paths[-1])
    for path, state in zip(paths, states, strict=True):
        _write(path, state, "stable_cascade")
    text = f"{', '.join(paths)}: {config.model_path} in the layout of Stable Cascade"
    if saved.settings.name == "stage_c_controlnet":
        text += f"\nTo be used there with controlnet_blocks {list(saved.settings.controlnet.controlnet_blocks)}"
    return text + (f"\nIts code has other settings than {', '.join(others)}: change them there" if others else "")


def _lora_to_cascade(config: ConvertConfig, lora: Lora) -> str:
    about = lora.about
    if about.kind != "stage_c":
        raise InputError(
            f"{config.model_path} is a LoRA of a {about.kind}, but Stable Cascade has those of stage C only"
        )
    if not config.base:
        raise InputError(f"{config.model_path} is a LoRA: give the checkpoint of its stage C with --base")
    saved = open_network(config.base, "stage_c")
    with without_values():
        network = cast(StageC, saved.build())
    tokens = lora.tokens(adapter_clip(saved, config.clip_path).tokenizer) if about.train_tokens else None
    state, filters = lora_state(lora, network, saved.settings.model.states_width, tokens)
    _write(config.out, state, "stable_cascade")
    return (
        f"{config.out}: {config.model_path} in the layout of Stable Cascade\nTo be used there with rank {about.rank}, "
        f"module_filters {list(filters)} and train_tokens {list(about.train_tokens)}"
    )


def _write(path: str, state: Mapping[str, Tensor], layout: str) -> None:
    """Write weights alone, as safetensors or, by another ending, as torch does."""
    with _writer(path, state) as file:
        if path.endswith(SAFETENSORS):
            write_safetensors(file, state, {"layout": layout})
        else:
            torch.save(state, file)


@contextlib.contextmanager
def _writer(path: str, state: Mapping[str, Tensor]) -> Iterator[Any]:
    """``storage.atomic_writer`` for a file of these weights, with a bar on a terminal if it takes over a second."""
    size = sum(value.nbytes for value in state.values())
    bar = tqdm(total=size, desc="Writing", unit="B", unit_scale=True, delay=1.0, disable=None)
    with bar, storage.atomic_writer(path) as file:
        yield CallbackIOWrapper(bar.update, file, "write")


def table_text(table: Mapping[str, Weight]) -> str:
    """A table of weights in Markdown: the name in the file, the shape there, and our name."""
    rows = [
        [f"`{other}`", "×".join(map(str, weight.other_shape)), f"`{weight.own}`"] for other, weight in table.items()
    ]
    return markdown_table(["in the file", "shape", "in diff_dalle"], rows) + "\n"
