"""What identifies training data, and what is said about other data."""

import pytest
import torch
from refusing import refused

from diff_dalle.data.fingerprint import Fingerprint, changes, check_ranks
from diff_dalle.distributed.world import SINGLE, World

NAMES = [f"{i:05d}.tar" for i in range(4)]


def make(folder="/data", names=NAMES, sizes=(100, 200, 300, 400), samples=(1, 2, 3, 4), end=""):
    return Fingerprint.of([f"{folder}/{name}{end}" for name in names], sizes, samples)


@pytest.mark.parametrize("folder", ["data", "s3://bucket/data", "https://user:word@host/data", "gs://bucket"])
def test_data_copied_elsewhere_are_the_same(folder):
    assert make(folder) == make() and make(folder).digest == make().digest


def test_signatures_of_urls_do_not_matter():
    first, second = (make("https://host/data", end=f"?X-Signature={secret}") for secret in ("abc", "def"))
    assert first.digest == second.digest == make().digest
    commands = ["pipe:curl -H 'Authorization: Bearer abc1' https://host/0.tar", "pipe:cat 1.tar"]
    first = Fingerprint.of(commands, [1, 2], [1, 2])
    assert "abc1" not in first.text() and first == Fingerprint.of(
        [commands[0].replace("abc1", "x2y"), commands[1]], [1, 2], [1, 2]
    )


def test_the_list_is_read_back():
    odd = Fingerprint.of(['/a/x\n\t"é\u2028.tar', "/a/b.tar"], [1, 2**40], [3, 4])
    assert Fingerprint.parse(odd.text()) == odd and Fingerprint.parse(odd.text()).digest == odd.digest
    assert odd.totals == "2 shards with 7 samples"
    for text in ("3\n", '["a", 1]\n', '["a", 1, 2.0]\n', "[1, 2, 3]\n", "x\n", '["a", 1, true]\n'):
        with pytest.raises(ValueError):
            Fingerprint.parse(text)


OTHERS = {
    "more": (make(names=[*NAMES, "9.tar", "8.tar"], sizes=range(6), samples=range(6)), "2 shards new (9.tar, 8.tar)"),
    "fewer": (make(names=NAMES[1:], sizes=(200, 300, 400), samples=(2, 3, 4)), "1 shard gone (00000.tar)"),
    "size": (make(sizes=(100, 201, 300, 400)), "1 shard of another size (00001.tar)"),
    "samples": (make(samples=(1, 2, 3, 5)), "1 shard of another number of samples (00003.tar)"),
    "order": (
        make(names=NAMES[::-1], sizes=(400, 300, 200, 100), samples=(4, 3, 2, 1)),
        "the same shards in another order",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_every_change_changes_the_digest_and_is_named(case):
    other, words = OTHERS[case]
    assert other.digest != make().digest
    assert words in changes(make(), other)


def test_only_the_first_shards_are_named():
    many = make(names=[f"{i}.tar" for i in range(99)], sizes=[1] * 99, samples=[1] * 99)
    text = changes(make(names=[], sizes=[], samples=[]), many)
    assert text == "99 shards new (0.tar, 1.tar, 2.tar, …)"


def test_shards_of_the_same_name_in_several_folders_are_told_apart():
    def both(second):
        return Fingerprint.of(["a/0.tar", "b/0.tar"], [100, second], [1, 1])

    assert changes(both(200), both(300)) == "1 shard of another size (0.tar)"
    assert changes(both(200), Fingerprint.of(["a/0.tar"], [100], [1])) == "1 shard gone (0.tar)"


class Ranks(World):
    """Two ranks, of which this is the second."""

    def __init__(self, first: Fingerprint):
        super().__init__(SINGLE, torch.device("cpu"))
        self.first, self.asked = first, 0

    def gather(self, value):
        self.asked += 1
        return [self.first.digest if self.asked == 1 else "", value]

    def broadcast(self, value=None):
        return self.first.rows


def test_ranks_that_see_other_shards_are_named():
    check_ranks(Ranks(make()), make(), "--data_dir")
    with refused(r"--data_dir names other shards on rank 1 than on rank 0: 1 shard of another size"):
        check_ranks(Ranks(make()), OTHERS["size"][0], "--data_dir")
