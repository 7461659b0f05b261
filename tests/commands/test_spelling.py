"""What shared code says about settings, as the files of a decoder and of a cascade spell them."""

import re

import pytest

from diff_dalle.config import Fault, InputError, as_flag, leaves, named
from diff_dalle.recipes.cascade.controlnet import StageCControlNetRun
from diff_dalle.recipes.cascade.stages import StageBRun
from diff_dalle.recipes.control import ControlNetRun
from diff_dalle.recipes.decoder import DecoderRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.lora import StageCLora
from diff_dalle.recipes.recipe import spelled_as_in_file
from diff_dalle.training.loop import Diverged

CASCADE = (StageBRun, StageCControlNetRun, StageCLora)


def told(config_class, *names: str) -> str:
    """Names of settings as users of a command are told them."""
    with pytest.raises(InputError) as error, spelled_as_in_file(config_class):
        raise InputError(" ".join(map(named, names)))
    return error.value.message(as_flag)


def test_messages_name_the_paths_of_the_file():
    names = ("max_broken", "lr", "warmup_steps", "log_interval", "logdir", "seed", "iterations", "unknown")
    assert told(DecoderRun, *names) == (
        "data.max_broken train.lr train.warmup_steps train.log_interval tracker.data_path seed train.epochs unknown"
    )
    message = r"^train\.lr is 3, but must be at most the tracker\.log$"
    with pytest.raises(InputError, match=message), spelled_as_in_file(DecoderRun):
        raise InputError(Fault("lr", f"must be at most the {named('trackers')}", 3))


@pytest.mark.parametrize("kind", CASCADE)
def test_messages_name_the_keys_of_a_cascade(kind):
    weights = {"StageBRun": "generator", "StageCControlNetRun": "controlnet", "StageCLora": "lora"}[kind.__name__]
    names = ("dataset_filters", "lr", "warmup_steps", "logdir", "init_checkpoint", "trackers", "steps", "caption_field")
    assert told(kind, *names) == (
        f"dataset_filters lr warmup_updates experiment_id {weights}_checkpoint_path wandb_project sampling.steps "
        "captions_getter"
    )


def test_commands_that_flags_set_keep_their_flags():
    assert told(GeneratorRun, "lr", "logdir") == "--lr --logdir" == told(ControlNetRun, "lr", "logdir")


@pytest.mark.parametrize("kind", [DecoderRun, *CASCADE])
def test_every_name_is_a_setting_of_the_file(kind):
    own = {".".join(leaf.path): leaf.path[-1] for leaf in leaves(kind)}
    assert set(kind.renamed.values()) <= set(own)
    of_others = {name for name, path in kind.renamed.items() if name != own[path]}
    assert not of_others & set(own.values())


@pytest.mark.parametrize("kind", [InputError, Diverged])
def test_errors_keep_their_kind(kind):
    with pytest.raises(kind, match=re.escape("set data.batch_size")) as error, spelled_as_in_file(DecoderRun):
        raise kind(f"set {named('batch_size')}")
    assert type(error.value) is kind
