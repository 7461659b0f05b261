"""How a model is used: a command line and the Python for it, by what its first network is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

_PICTURES = "path/to/images"
_READ = "from diff_dalle.images.files import read_image\n\n"
_CONTROL = 'control=diff_dalle.Control([read_image("photo.png")])'
_IMAGES = 'images=[read_image("photo.png")]'
_LATENT = {"stage_c": "stage_c.pt", "stage_b": "stage_b.pt", "stage_a": "stage_a.pt"}  # what is not in the model


def model_usage(settings: Any, name: str, path: str, prompt: str, roles: Sequence[str] = ()) -> tuple[str, str]:
    """A command, and Python after ``import diff_dalle``.

    settings, name: of the network, as ``SavedNetwork`` has them (name = trainee). path: where it is. prompt: an
    example. roles: the settings that its model has files for, which need not be given.
    """
    kind = settings.name
    if kind in ("classifier", "vit_clip"):
        return _classifier(settings.contrastive.noised, path, prompt)
    if kind == "noisy_classifier":
        flags = f"--model_path ema.pt --classifier_path {_shell(path)} --labels 0"
        return _sampled(flags, _python("ema.pt"), f"labels=[0], classifier={_python(path)}")
    prompts, flags = _python([prompt]), f"--prompts {_shell(prompt)}"
    if kind == "generator":
        model = settings.model
        if model.is_upsampler:
            return _upsampler(path)
        if model.text.enc_attn_dim:
            return _sampled(f"--model_path {_shell(path)} {flags}", _python(path), prompts)
        if model.unet.num_classes:
            return _sampled(f"--model_path {_shell(path)} --labels 0", _python(path), "labels=[0]")
        return _sampled(f"--model_path {_shell(path)} --num_samples 4", _python(path), "num_samples=4")
    if kind == "decoder":
        return _decoder(settings.decoder, name, path, prompt)
    if kind in ("controlnet", "stage_c_controlnet"):
        base = "ema.pt" if kind == "controlnet" else "stage_c.pt"
        command = f"--model_path {base} --controlnet {_shell(path)} --control_image {_PICTURES} {flags}"
        return _sampled(command, f"{_python(base)}, controlnet={_python(path)}", f"{prompts}, {_CONTROL}", _READ)
    return _latent(kind, path, prompt, roles)


def lora_usage(kind: str, path: str, prompt: str) -> tuple[str, str]:
    """A command, and Python after ``import diff_dalle``, of a LoRA for a network of this kind."""
    if kind == "classifier":
        command = f"diff-dalle merge_lora --model_path clip.pt --lora {_shell(path)} --out merged.pt"
        return command, 'classifier = diff_dalle.load_classifier("merged.pt")'
    if kind in _LATENT:
        base = _LATENT["stage_c"]
        others = "".join(f" --{name} {file}" for name, file in _LATENT.items() if file != base)
        loaded = "".join(f", {name}={_python(file)}" for name, file in _LATENT.items() if file != base)
    else:
        base, others, loaded = "ema.pt", "", ""
    command = f"--model_path {base}{others} --lora {_shell(path)} --prompts {_shell(prompt)}"
    return _sampled(command, f"{_python(base)}{loaded}, lora=[{_python(path)}]", _python([prompt]))


def _classifier(noised: bool, path: str, prompt: str) -> tuple[str, str]:
    if noised:
        command = f"diff-dalle sample --model_path ema.pt --classifier_path {_shell(path)} --prompts {_shell(prompt)}"
    else:
        command = f"diff-dalle prepare_data embeddings --data_dir path/to/shards --clip_path {_shell(path)}"
        command += " --out_dir path/to/embeddings"
    code = f"classifier = diff_dalle.load_classifier({_python(path)})\n"
    return command, f"{code}embeddings = classifier.encode_text({_python([prompt])})"


def _upsampler(path: str) -> tuple[str, str]:
    command = f"--low_res_dir {_PICTURES} --upsampler_paths {_shell(path)}"
    read = f"from diff_dalle.images.files import read_low_res\n\n_, pictures = read_low_res({_python(_PICTURES)})\n"
    return _sampled(command, f"upsampler_paths=[{_python(path)}]", "low_res=pictures", read)


def _decoder(decoder: Any, name: str, path: str, prompt: str) -> tuple[str, str]:
    stage = decoder.named(name or decoder.names[0])
    if stage.is_upsampler:
        return _upsampler(path)
    if stage.image_embedding:
        return _sampled(f"--model_path {_shell(path)} --images {_PICTURES}", _python(path), _IMAGES, _READ)
    if stage.has_text:
        command = f"--model_path {_shell(path)} --prompts {_shell(prompt)}"
        return _sampled(command, _python(path), _python([prompt]))
    return _sampled(f"--model_path {_shell(path)} --num_samples 4", _python(path), "num_samples=4")


def _latent(kind: str, path: str, prompt: str, roles: Sequence[str]) -> tuple[str, str]:
    """A network of a latent cascade: with the files of the others."""
    paths = {**_LATENT, kind: path}
    missing = [name for name in ("stage_b", "stage_a") if name == kind or name not in roles]
    rest = "".join(f" --{name} {_shell(paths[name])}" for name in missing)
    others = "".join(f", {name}={_python(paths[name])}" for name in missing)
    if kind == "semantic":
        command = f"--reconstruct {_PICTURES}{rest} --semantic {_shell(path)}"
        pictures = 'reconstruct=[read_image("photo.png")]'
        return _sampled(command, f"semantic={_python(path)}{others}", pictures, _READ)
    command = f"--model_path {_shell(paths['stage_c'])}{rest} --prompts {_shell(prompt)}"
    return _sampled(command, f"{_python(paths['stage_c'])}{others}", _python([prompt]))


def _sampled(flags: str, loaded: str, sampled: str, before: str = "") -> tuple[str, str]:
    code = f"{before}pipeline = diff_dalle.load({loaded})\n"
    return f"diff-dalle sample {flags}", f"{code}images = pipeline.sample({sampled})  # uint8 [N, H, W, 3]"


def _shell(text: str) -> str:
    return shlex.quote(text)


def _python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
