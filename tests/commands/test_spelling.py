"""What shared code says about settings, as the files of a decoder and of a cascade spell them."""

import re

import pytest

from diff_dalle.commands.cascade.controlnet import StageCControlNetRun
from diff_dalle.commands.cascade.stages import StageBRun
from diff_dalle.commands.lora.kinds import StageCLora
from diff_dalle.commands.spelling import file_names, respelled, spelled_as_in_file
from diff_dalle.commands.train_controlnet import ControlNetRun
from diff_dalle.commands.train_decoder import DecoderRun
from diff_dalle.commands.train_generator import GeneratorRun
from diff_dalle.config import leaves
from diff_dalle.errors import InputError
from diff_dalle.training.stopping import Diverged

NAMES = file_names(DecoderRun)
CASCADE = (StageBRun, StageCControlNetRun, StageCLora)


def test_messages_name_the_paths_of_the_file():
    for text, expected in {
        "more than --max_broken 0.02 allows": "more than data.max_broken 0.02 allows",
        "lower --lr or raise --warmup_steps.": "lower train.lr or raise train.warmup_steps.",
        "or accept it by --accept_changed_batch True": "or accept it by train.accept_changed_batch True",
        "Choose another --logdir to start": "Choose another tracker.data_path to start",
        "set --device cpu, --threads 1, --seed 2": "set --device cpu, --threads 1, seed 2",  # two flags of the command
        "--unknown, a--b, pipe:cat x --all": "--unknown, a--b, pipe:cat x --all",
    }.items():
        assert respelled(text, NAMES) == expected


@pytest.mark.parametrize("kind", CASCADE)
def test_messages_name_the_keys_of_a_cascade(kind):
    weights = {"StageBRun": "generator", "StageCControlNetRun": "controlnet", "StageCLora": "lora"}[kind.__name__]
    for text, expected in {
        "--dataset_filters rejects all samples": "dataset_filters rejects all samples",
        "lower --lr or raise --warmup_steps.": "lower lr or raise warmup_updates.",
        "set --batch_size, or accept by --accept_changed_batch True": "set batch_size, or accept by "
        "--accept_changed_batch True",  # a flag of the command
        "choose another --logdir, by --init_checkpoint": f"choose another experiment_id, by {weights}_checkpoint_path",
        "tracker x needs y, or remove wandb from --trackers": "tracker x needs y, or leave out wandb_project",
        "make files by scripts/a.py --batch_size 2 --out x, or raise --batch_size": "make files by scripts/a.py "
        "--batch_size 2 --out x, or raise batch_size",  # the flags of a script are its own
        "lower --steps, --lr_anneal, --unknown": "lower sampling.steps, --lr_anneal, --unknown",
    }.items():
        assert respelled(text, file_names(kind)) == expected


def test_commands_that_flags_set_keep_their_flags():
    assert file_names(GeneratorRun) == {} == file_names(ControlNetRun)


@pytest.mark.parametrize("kind", [DecoderRun, *CASCADE])
def test_every_name_is_a_setting_of_the_file(kind):
    names = {name: own for name, own in file_names(kind).items() if " " not in name}
    assert set(names.values()) <= {".".join(leaf.path) for leaf in leaves(kind)}
    of_sections = {leaf.name for leaf in leaves(kind) if leaf.has_flag and len(leaf.path) > 1}
    assert not set(names) & of_sections and not set(kind.renamed) & {leaf.path[-1] for leaf in leaves(kind)}


@pytest.mark.parametrize("kind", [InputError, Diverged])
def test_errors_keep_their_kind(kind):
    with pytest.raises(kind, match=re.escape("set data.batch_size")) as error, spelled_as_in_file(DecoderRun):
        raise kind("set --batch_size")
    assert type(error.value) is kind
