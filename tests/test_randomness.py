import math

import numpy as np
import pytest
import torch
from operation_counting import operations

from diff_dalle.config import InputError
from diff_dalle.randomness import (
    MAX_SEED,
    Draw,
    check_seeds,
    mix64,
    normal_pairs,
    permutation,
    random_bits,
    random_uniform,
    random_uniforms,
    splitmix64,
)

GOLDEN = [0.24987237, -1.29289472, 1.02945304, 1.17570889, -0.64424032, -1.37185681]
SHAPE = (3, 5, 7)  # an odd number of elements: half of the last pair is not used


def test_splitmix64_known_values():
    """The first outputs of SplitMix64 seeded with 0 are published with the algorithm."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % 2**64], dtype=np.uint64)
    published = ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]
    assert [f"{x:016x}" for x in mix64(states).tolist()] == published
    outputs = splitmix64(torch.zeros(1, dtype=torch.int64), 3).numpy().view(np.uint64)
    assert [f"{x:016x}" for x in outputs[0].tolist()] == published


def test_the_sequence_is_the_same_on_tensors_as_in_numpy():
    """On all bit patterns of the key, where a signed shift or a lost carry would show."""
    keys = random_bits(0, "keys", range(200))
    states = keys[:, None] + np.arange(50, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert (splitmix64(torch.from_numpy(keys.view(np.int64)), 50).numpy().view(np.uint64) == mix64(states)).all()


def test_values_depend_on_seed_purpose_and_position_only():
    a = random_bits(1, "noise", range(100))
    assert (a[10:20] == random_bits(1, "noise", range(10, 20))).all()
    assert len(set(a) | set(random_bits(2, "noise", range(100))) | set(random_bits(1, "crop", range(100)))) == 300


def test_a_uniform_number_is_made_from_the_upper_bits_of_its_purpose():
    positions, purposes = [0, 7, 2**40], ["crop", "flip"]
    bits = [random_bits(3, purpose, positions).tolist() for purpose in purposes]
    found = random_uniforms(3, purposes, positions)
    assert found.T.tolist() == [[(each >> 11) / 2**53 for each in column] for column in bits]
    assert found[:, 1].tolist() == random_uniform(3, "flip", positions).tolist()


def test_permutation_is_one_and_is_keyed():
    p = permutation(1, "epoch 0", 1000)
    assert sorted(p) == list(range(1000))
    assert (p != permutation(1, "epoch 1", 1000)).mean() > 0.9


def test_draws_are_the_same_in_any_batch():
    whole = Draw(7, torch.arange(8))
    part = Draw(7, torch.tensor([5, 2]))
    assert torch.equal(whole.normal("noise", SHAPE)[[5, 2]], part.normal("noise", SHAPE))
    assert torch.equal(whole.uniform("t")[[5, 2]], part.uniform("t"))
    assert torch.equal(whole.keys("dropout")[[5, 2]], part.keys("dropout"))


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_device_makes_the_same_numbers_from_the_positions_alone(seed):
    """Bit for bit. Of another device only the positions are on the CPU here, where they can be read."""
    index = torch.tensor([0, 1, 2**40, 2**62])
    here, there = Draw(seed, index), Draw(seed, index, "meta")
    there.positions = index
    assert torch.equal(there.keys("a"), here.keys("a")) and torch.equal(there.keys("b"), here.keys("b"))
    assert torch.equal(there.uniform("a"), here.uniform("a")) and there.uniform("a").dtype == torch.float64
    assert torch.equal(there.normal("a", SHAPE), here.normal("a", SHAPE))


def test_uniform_numbers_for_several_purposes_are_those_for_each():
    draw = Draw(7, torch.arange(8))
    found = draw.uniforms(["a", "b"])
    assert list(found) == ["a", "b"] and all(torch.equal(found[name], draw.uniform(name)) for name in found)


def test_every_draw_depends_on_its_seed_and_purpose():
    one, other = (Draw(seed, torch.arange(8)) for seed in (7, 8))
    for draw in (Draw.keys, Draw.uniform, lambda each, purpose: each.normal(purpose, SHAPE)):
        assert (draw(one, "a") != draw(other, "a")).all() and (draw(one, "a") != draw(one, "b")).all()


@pytest.mark.parametrize("size", [1, 2, 105, 3000, 70_000])
def test_normal_numbers_are_the_same_alone_in_any_batch_and_on_any_number_of_threads(size):
    """Bit for bit: vectorized kernels and their remainders, and the slices of several threads, must not differ."""
    draw, threads = Draw(1, torch.arange(5)), torch.get_num_threads()
    whole = draw.normal("noise", (size,))
    assert whole.shape == (5, size) and whole.dtype == torch.float32
    torch.set_num_threads(3)
    try:
        assert torch.equal(draw.normal("noise", (size,)), whole)
    finally:
        torch.set_num_threads(threads)
    for i in range(5):
        assert torch.equal(Draw(1, torch.tensor([i])).normal("noise", (size,))[0], whole[i])


def test_golden_normal_numbers():
    """A resumed run, and a seed on another machine, must get the same noise."""
    expected = torch.tensor(GOLDEN)
    torch.testing.assert_close(Draw(5, torch.tensor([2**40])).normal("noise", (6,))[0], expected, rtol=0, atol=2e-6)


def test_normal_pairs_follow_the_exact_formula():
    """At random bits and where rounding or a sign could give an infinity."""
    edges = [0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), (2**31 - 1) << 32]
    bits = torch.cat([torch.tensor(edges), splitmix64(torch.tensor([3]), 20_000)[0]])[None]
    low, high = bits & 0xFFFFFFFF, bits >> 32
    low = torch.where(low >= 2**31, 2**32 - low, low).double()  # the magnitude of the signed lower half
    radius = (-2 * ((low + 0.5) * 2.0**-31).clamp(max=1).log()).sqrt()
    angle = high.double() * math.pi * 2.0**-31
    exact = torch.stack([radius * angle.cos(), radius * angle.sin()], 2).flatten(1)
    found = normal_pairs(bits)
    # The radius is the root of a logarithm of a rounded number, whose error is large where it is nearly 0.
    well = (radius > 0.01).repeat_interleave(2, 1)
    assert found.isfinite().all() and found.abs().max() < 6.7 and (found - exact).abs().max() < 1e-3
    assert (found - exact)[well].abs().max() < 1e-5


def test_a_draw_takes_as_many_operations_for_any_batch():
    draws = [Draw(0, torch.arange(n)) for n in (1, 64)]
    counts = [operations(lambda draw=draw: draw.normal("noise", (8, 8))) for draw in draws]
    assert counts[0] == counts[1] and counts[0].total() <= 26


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 2**64])
def test_seeds_out_of_range_are_refused(seed):
    """They would repeat the numbers of another seed."""
    with pytest.raises(InputError, match=rf"upsampler_seed is {seed}, but must lie between 0 and 2\^63 - 1"):
        check_seeds([0, seed], "upsampler_seed")
    with pytest.raises(InputError, match=f"seed is {seed}"):
        random_bits(seed, "noise", [0])
    check_seeds([0, MAX_SEED])
