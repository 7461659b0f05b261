"""Learn the tokenizer's vocabulary from WordNet's glosses, in about ten seconds. With Debian's package wordnet-base and
its default settings it reproduces the built-in ``diff_dalle/text/vocabulary.txt`` byte for byte."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.launch import run_script
from diff_dalle.text.bpe_training import VocabularyConfig, count_words, learn_merges, wordnet_glosses
from diff_dalle.text.tokenizer import load_tokenizer
from diff_dalle.text.vocabulary import OWN_HEADER, write_merge_file


def main():
    config = parse(VocabularyConfig, description=__doc__)
    counts = count_words(wordnet_glosses(config.wordnet_dir))
    merges = learn_merges(counts, config.num_merges)
    write_merge_file(config.out, OWN_HEADER, merges)
    print(f"Wrote {config.out}: {load_tokenizer(config.out).identity}")


if __name__ == "__main__":
    run_script(main)
