"""What shared code says about settings, as a decoder's file spells them."""

import re

import pytest

from diff_dalle.commands.decoder.spelling import RENAMED, file_names, respelled, spelled_as_in_file
from diff_dalle.commands.train_decoder import DecoderRun
from diff_dalle.config import leaves
from diff_dalle.errors import InputError
from diff_dalle.training.stopping import Diverged

NAMES = file_names(DecoderRun)


def test_messages_name_the_paths_of_the_file():
    for text, expected in {
        "more than --max_broken 0.02 allows": "more than data.max_broken 0.02 allows",
        "lower --lr or raise --warmup_steps.": "lower train.lr or raise train.warmup_steps.",
        "or accept it by --accept_changed_batch True": "or accept it by train.accept_changed_batch True",
        "Choose another --logdir to start": "Choose another tracker.data_path to start",
        "set --device cpu, --threads 1, --seed 2": "set --device cpu, --threads 1, --seed 2",  # flags of the command
        "--unknown, a--b, pipe:cat x --all": "--unknown, a--b, pipe:cat x --all",
    }.items():
        assert respelled(text, NAMES) == expected


def test_every_name_is_a_setting_of_the_file():
    paths = {".".join(leaf.path) for leaf in leaves(DecoderRun)}
    assert set(NAMES.values()) <= paths and set(RENAMED.values()) <= paths
    keys = [leaf.path[-1] for leaf in leaves(DecoderRun) if leaf.in_file]
    assert len(keys) == len(set(keys)) and not set(keys) & set(RENAMED)
    assert not set(NAMES) & {leaf.name for leaf in leaves(DecoderRun) if leaf.has_flag}


@pytest.mark.parametrize("kind", [InputError, Diverged])
def test_errors_keep_their_kind(kind):
    with pytest.raises(kind, match=re.escape("set data.batch_size")) as error, spelled_as_in_file(DecoderRun):
        raise kind("set --batch_size")
    assert type(error.value) is kind
