"""Learn a tokenizer's vocabulary from the captions of shards, or from WordNet's glosses, in about ten seconds. With
Debian's package wordnet-base and its default settings it reproduces the built-in ``diff_dalle/text/vocabulary.txt``
byte for byte."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.train_tokenizer import VocabularyConfig, train_tokenizer
from diff_dalle.distributed.launch import run_script


def main():
    print(train_tokenizer(parse(VocabularyConfig, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
