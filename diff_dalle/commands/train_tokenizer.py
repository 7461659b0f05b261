"""What ``train_tokenizer.py`` is set by and does: a vocabulary learned from captions, or from WordNet's glosses."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Fault, faults_of, option, settings
from ..config.bounds import MAX_ROWS
from ..data.captions import caption_kind, caption_option
from ..data.inspection import caption_texts
from ..text.bpe_training import add_caption_words, count_words, learn_merges, wordnet_glosses
from ..text.tokenizer import load_tokenizer
from ..text.vocabulary import CAPTIONS_HEADER, OWN_HEADER, write_merge_file


@settings
class VocabularyConfig:
    """Vocabulary"""

    data_dir: tuple[str, ...] = option(
        (),
        "shards of captions to learn from; empty = WordNet's glosses and common words of captions",
    )
    caption_field: str = caption_option()
    wordnet_dir: str = option("/usr/share/wordnet", "folder with WordNet's data.* files (Debian: package wordnet-base)")
    num_merges: int = option(
        16384, "number of merges to learn; the vocabulary adds 512 byte tokens, start and end", least=1, most=MAX_ROWS
    )
    out: str = option("vocabulary.txt", "output merge file")

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: caption_kind(self.caption_field))


def train_tokenizer(config: VocabularyConfig) -> str:
    """Write the merge file. Returns a line that names it and the tokenizer's identity."""
    if config.data_dir:
        header, counts = CAPTIONS_HEADER, count_words(caption_texts(config.data_dir, config.caption_field))
    else:
        header, counts = OWN_HEADER, add_caption_words(count_words(wordnet_glosses(config.wordnet_dir)))
    write_merge_file(config.out, header, learn_merges(counts, config.num_merges))
    return f"Wrote {config.out}: {load_tokenizer(config.out).identity}"
