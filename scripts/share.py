"""Share models: ``push`` sends one with its card to the Hugging Face hub or a folder, ``pull`` fetches one.

A model is a folder: ``model.json``, which says what each file is for, weights as ``.safetensors``, and ``README.md``,
its card. The card is made from records: settings, steps and samples in the checkpoints; data, batch and hours in
``run.json`` and ``progress.jsonl`` beside them; scores and pictures in the folder of a report. Nothing else of the run
is sent.

On the hub, a model is one commit, which also removes the files of a model that was pushed there before; others stay.
``HF_TOKEN`` or ``hf auth login`` gives access, a new repository is private, and ``HF_ENDPOINT`` selects another server.
An interrupted ``push`` or ``pull`` leaves no partial model; repeated, ``push`` sends what the hub lacks, and ``pull``
resumes its current file. ``HF_HUB_OFFLINE=1`` allows the client's cache only."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import run_subcommand
from diff_dalle.commands.share import COMMANDS
from diff_dalle.distributed.launch import run_script


def main():
    for line in run_subcommand(COMMANDS, __doc__):
        print(line)


if __name__ == "__main__":
    run_script(main)
