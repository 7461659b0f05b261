"""Plans: memory beside the tensors of real steps, FLOPs beside torch's counter, times and costs by hand."""

import dataclasses
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from benchmarks import plan as benchmark
from marks import slow
from script_running import run as run_script
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.info import parse_plan, plan
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.cost import peak_bytes
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.planning import calibration, cost
from diff_dalle.recipes.planning.calibration import Steps, reached
from diff_dalle.recipes.planning.cluster import GPUS, PlanConfig, sent_bytes
from diff_dalle.recipes.planning.cost import NetworkCost, networks_of
from diff_dalle.recipes.planning.plan import Plan
from diff_dalle.recipes.planning.step import Layout, Memory, Option, Step, largest_that_fits
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

GENERATOR = [
    *("--image_size", "16", "--num_channels", "32", "--channel_mult", "1", "--num_res_blocks", "1"),
    *("--attention_resolutions", "16", "--num_heads", "2", "--enc_attn_dim", "32", "--enc_depth", "1"),
    *("--enc_heads", "2", "--text_length", "8", "--precision", "fp32", "--num_workers", "0"),
]
CLASSIFIER = [
    *("--image_size", "16", "--classifier_width", "32", "--classifier_channel_mult", "1,2", "--classifier_depth", "1"),
    *("--classifier_attention_resolutions", "8", "--classifier_enc_attn_dim", "32", "--classifier_enc_depth", "1"),
    *("--classifier_enc_heads", "2", "--text_length", "8", "--precision", "fp32", "--num_workers", "0"),
]
PLANNED = [*GENERATOR, "--batch_size", "16"]


@dataclass(frozen=True)
class Counted(NetworkCost):
    """A network of which all that is measured is given: 100 MB, and 1 MB an image."""

    parameters = 1_000_000  # type: ignore[assignment]
    shapes = (((1000, 900),), ((1000, 100),))  # type: ignore[assignment]

    def training_flops(self, checkpoint):
        return 4_000_000_000 if checkpoint else 3_000_000_000

    def operations(self, checkpoint):
        return 1300 if checkpoint else 1000

    def peak(self, images, checkpoint, accumulates):
        return 100_000_000 + images * (400_000 if checkpoint else 1_000_000)


class Whole(Counted):
    """One that cannot be sharded."""

    shapes = ()  # type: ignore[assignment]


def step(networks, batch=16, **config):
    """A step on GPUs of these settings, on one if they say no number."""
    return Step(networks, PlanConfig(**{"gpus": 1, **config}), batch)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_shapes(ShapesConfig(image_size=16, train_samples=64, val_samples=1, samples_per_shard=16), str(folder))
    return str(folder / "train")


@pytest.fixture(scope="module")
def tiny():
    """A generator's networks. What they cost is computed once."""
    return networks_of(parse(GeneratorRun, GENERATOR).recipe())


@pytest.fixture(scope="module")
def counted():
    found = networks_of(parse(GeneratorRun, GENERATOR).recipe())
    return [Counted(*(getattr(each, field.name) for field in dataclasses.fields(each))) for each in found]


@pytest.fixture(scope="module")
def planned(counted):
    """Plans of the counted network."""

    def of(*flags: str) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("diff_dalle.recipes.planning.plan.networks_of", lambda run, half: counted)
            return Plan.of(
                parse_plan([*PLANNED, *(() if "--iterations" in flags else ("--iterations", "1000")), *flags])
            )

    return of


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("run_class", "settings", "flags"),
    [
        (GeneratorRun, GENERATOR, "--batch_size 16 --use_checkpoint True"),
        slow(GeneratorRun, GENERATOR, "--batch_size 16 --microbatch 4 --ema_rate 0.9,0.99"),
        slow(GeneratorRun, GENERATOR, "--batch_size 2 --optimizer muon"),
        (ClassifierRun, CLASSIFIER, "--batch_size 16 --microbatch 8 --optimizer muon --ema_rate none"),
    ],
)
def test_memory_is_that_of_the_tensors_of_a_step(run_class, settings, flags, world):
    others = benchmark.live_bytes()
    preview = ["--sample_interval", "0"] if run_class is GeneratorRun else []
    run = parse(run_class, [*settings, *preview, *flags.split(), "--data_dir", world])
    recipe = run.recipe()
    step = Step.of(recipe, PlanConfig(gpus=1), networks_of(recipe))
    found = step.memory(Layout(checkpoint=step.networks[0].probe.checkpointed), recipe.microbatch)
    steps = Steps.of(run.recipe(), ALONE)
    steps.seconds(1)
    (trainee,) = steps.loop.trainees
    weights = sum(each.nbytes for each in trainee.task.model.parameters())
    averages = sum(each.nbytes for ema in trainee.emas for each in ema.averages.values())
    state = trainee.optimizations[""].optimizer.state.values()
    moments = sum(each.nbytes for entry in state for name, each in entry.items() if name != "step")
    assert (found.weights, found.gradients) == (weights, weights)
    assert (found.averages, found.optimizer) == (averages, moments)
    assert found.total == pytest.approx(benchmark.peak_of_step(steps, others), rel=0.10)


def test_gradients_count_where_the_pass_makes_them():
    """Three matrices of 4 MB: their gradients stay, or are added to others one at a time."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(3)))
        peaks = [peak_bytes(model, lambda net: net(torch.zeros(1, 1000)), accumulates=on) for on in (True, False)]
    assert 4e6 <= peaks[0] < 4.1e6 and 12e6 <= peaks[1] < 12.1e6


def test_memory_grows_with_the_micro_batch_and_checkpointing_takes_less(tiny):
    totals = [step(tiny, 64).memory(Layout(checkpoint=on), n).total for on in (False, True) for n in (8, 32)]
    assert totals[:2] == sorted(totals[:2]) and totals[2:] == sorted(totals[2:])
    assert all(more > less for more, less in zip(totals[:2], totals[2:], strict=True))
    for n in (8, 32):
        exact, estimated = (step(tiny, 128).memory(Layout(), n, exact).total for exact in (True, False))
        assert 0.9 * exact < estimated <= 1.001 * exact


def test_sharded_memory_falls_with_the_number_of_gpus(tiny):
    found = [step(tiny, 4, gpus=gpus).memory(Layout("fsdp"), 4) for gpus in (2, 8, 64)]
    whole = step(tiny, 4, gpus=8).memory(Layout("ddp"), 4)
    for part in ("weights", "gradients", "optimizer", "averages"):
        sizes = [getattr(each, part) for each in found]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] == pytest.approx(getattr(whole, part) / 2, rel=0.02)
    assert whole.gathered == 0 and found[0].gathered > 0 and found[0].activations == whole.activations


def test_frozen_networks_count(counted):
    more, plain = (step(counted, 4, frozen_memory=size).memory(Layout(), 4).total for size in (0.5, 0))
    assert more == plain + 2**29


def test_networks_that_take_turns_share_the_memory_of_activations(counted):
    one, two = (step(networks).memory(Layout(), 4) for networks in (counted, [*counted, *counted]))
    assert two.activations == one.activations and two.optimizer == 2 * one.optimizer


def test_half_precision_halves_most_activations(tiny):
    half = dataclasses.replace(tiny[0], half=True)
    growths = [network.peak(16, False, True) - network.peak(4, False, True) for network in (half, tiny[0])]
    assert 0.5 < growths[0] / growths[1] < 0.85


# ----------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("checkpoint", [False, True])
def test_flops_are_those_that_torch_counts(checkpoint, tiny):
    (network,) = tiny
    model, images = network.build(checkpoint).train(), 2
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.probe.forward(model, images, 16).sum().backward()
    assert network.training_flops(checkpoint) == pytest.approx(counter.get_total_flops() / images, rel=1e-6)
    assert 300 < network.operations(False) <= network.operations(checkpoint) < 3000


def test_recomputation_and_gradient_caching_take_more_flops(counted):
    assert step(counted).flops(True, 16) > step(counted).flops(False, 16) == 16 * counted[0].training_flops(False)
    cached, plain = (dataclasses.replace(step(counted), cached=on).flops(False, 4) for on in (True, False))
    assert cached == pytest.approx(4 / 3 * plain)
    assert dataclasses.replace(step(counted), cached=True).flops(False, 16) == plain  # one micro-batch needs no cache


def test_seconds_of_a_step(counted):
    """By hand: computing, launching, and a ring of all GPUs."""
    flops, parameters = step(counted).flops(False, 16), counted[0].parameters
    config = PlanConfig(gpu="a100_80", gpus=16, utilization=(0.1, 0.5), launch_time=(1e-9, 1e-9), network_speed=2.0)
    gradients = 4 * parameters  # exchanged between two nodes, an eighth by each GPU, and then within each
    wait = 2 * gradients * 7 / 8 / 300e9 + 2 * gradients / 8 / 2 / 2e9
    low, high = Step(counted, config, 16).seconds(Layout(), 16)
    assert low == pytest.approx(max(flops / (0.5 * 312e12), wait)) and high == pytest.approx(
        flops / (0.1 * 312e12) + wait
    )
    slow = dataclasses.replace(config, gpus=1, launch_time=(5.0, 10.0))
    alone = Step(counted, slow, 16)
    low, high = alone.seconds(Layout(), 4)
    assert low == pytest.approx(4 * counted[0].operations(False) * 5e-6) and high == pytest.approx(2 * low)
    assert dataclasses.replace(alone, calibrated=1e9).seconds(Layout(), 4) == (flops / 1e9, flops / 1e9)


def test_gpus_have_sensible_figures():
    for gpu in GPUS.values():
        assert 1e14 < gpu.peak < 3e15 and 20 < gpu.memory < 200 and 0 < gpu.price[0] < gpu.price[1]


def test_steps_take_the_time_of_the_clock_on_any_number_of_threads(world, monkeypatch):
    """Not that of the processor, of which two threads take twice as much."""
    run = parse(GeneratorRun, [*GENERATOR, "--batch_size", "4", "--sample_interval", "0", "--data_dir", world])
    steps = Steps.of(run.recipe(), ALONE)
    clock, processor = iter(range(100)), iter(range(0, 200, 2))
    clocks = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(processor))
    monkeypatch.setattr(calibration, "time", clocks)
    assert steps.seconds(2) == [1, 1]


def test_calibration_runs_as_training_does(world, monkeypatch):
    """With as many threads, and the memory of freed tensors kept."""
    flags = [*GENERATOR, "--batch_size", "4", "--sample_interval", "0", "--data_dir", world]
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(calibration, "reuse_freed_memory", lambda: seen.append("memory"))
    monkeypatch.setattr(Steps, "seconds", lambda self, n: seen.append(torch.get_num_threads()) or [1.0] * n)
    monkeypatch.setattr(calibration, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        for threads in ("1", "0"):
            reached(parse(GeneratorRun, [*flags, "--threads", threads]).recipe())
    finally:
        torch.set_num_threads(before)
    assert seen == ["memory", 1, "memory", 2]


def test_calibration_divides_the_flops_of_real_steps_by_their_time(tiny, world, monkeypatch):
    run = parse(
        GeneratorRun, [*GENERATOR, "--batch_size", "8", "--sample_interval", "0", "--data_dir", world, "--threads", "1"]
    )
    taken = []

    def seconds(self, count):
        taken.append(Steps.__dict__["real"](self, 2))
        return [9.0] * calibration.WARM_UP + [0.5] * (count - calibration.WARM_UP)

    monkeypatch.setattr(Steps, "real", Steps.seconds, raising=False)
    monkeypatch.setattr(Steps, "seconds", seconds)
    assert reached(run.recipe()) == pytest.approx(step(tiny, 8).flops(False, 8) / 0.5)
    assert len(taken[0]) == 2 and all(each > 0 for each in taken[0])


# --------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(("limit", "size"), [(100, 10), (99, 8), (80, 8), (79, 4), (10, 1), (9, 0)])
def test_the_largest_micro_batch_that_fits(limit, size):
    assert largest_that_fits(10, lambda n, exact: 10 * n, limit) == size
    assert largest_that_fits(10, lambda n, exact: 10 * n if exact else n, limit) == size


def option(parallel="ddp", microbatch=8, seconds=(1.0, 1.0), fits=True):
    return Option(Layout(parallel), microbatch, Memory(2**30, 2**30, 2**30, 2**30, 0, 4 * 2**30), fits, seconds)


def test_the_fastest_option_with_a_large_micro_batch_is_chosen():
    quick, small = option("fsdp", 16, (0.5, 0.6)), option("ddp", 4, (0.1, 0.1))
    of_many = step([], 64, gpus=8)
    assert of_many.chosen([option(), quick, small, option(fits=False, seconds=(0.0, 0.0))]) is quick
    assert of_many.chosen([option(microbatch=2), small]) is small
    assert step([], 4).chosen([small, quick]) is small  # which is the whole batch
    with pytest.raises(InputError, match="not even one image at a time fits: it takes 8.0 GiB on each of 8 GPUs"):
        of_many.chosen([option(fits=False)])


def test_what_cannot_be_sharded_is_left_out(counted):
    whole = [Whole(*(getattr(counted[0], field.name) for field in dataclasses.fields(counted[0])))]
    for networks, modes in ((counted, ["ddp", "ddp", "fsdp", "fsdp"]), (whole, ["ddp", "ddp"])):
        assert [each.layout.parallel for each in step(networks, 8, gpus=8).options()] == modes
    assert [each.layout.parallel for each in step(counted, 8).options()] == ["ddp", "ddp"]


def test_muon_exchanges_updates_and_has_a_share_of_the_matrices_at_a_time(counted, monkeypatch):
    muon = dataclasses.replace(counted[0], optim=dataclasses.replace(counted[0].optim, optimizer="muon"))
    assert [each.layout.parallel for each in step([muon], 8, gpus=8).options()] == ["ddp", "ddp", "fsdp", "fsdp"]
    layers = [each for each in muon.build(False).modules() if isinstance(each, (torch.nn.Linear, torch.nn.Conv2d))]
    matrices = sum(each.weight.numel() for each in layers)
    assert muon.optimizer_bytes == 4 * (2 * muon.parameters - matrices)
    for mode, within, between in (("ddp", 7 / 8, 1 / 16), ("fsdp", 0, 0), ("hsdp", 0, 1 / 16)):
        more, plain = (sent_bytes(network, 1, mode, 16, 8) for network in (muon, counted[0]))
        assert more.within - plain.within == pytest.approx(2 * matrices * within)
        assert more.between - plain.between == pytest.approx(2 * matrices * between)
    alone, copies, shares = (muon.update_bytes(*ranks) for ranks in ((), (8, 1), (1, 8)))
    assert 4 * matrices < alone < copies < 16 * matrices and matrices / 2 < shares < alone
    monkeypatch.setattr(cost, "LIMIT", 1)  # one matrix at a time: the largest, or an exchange of it
    largest = max(each.weight.numel() for each in layers)
    assert 4 * 4 * largest <= muon.update_bytes(1, 8) < shares
    network = dataclasses.replace(muon, half=True)  # another one, whose turns have not been found
    assert step([network], 8, gpus=8).memory(Layout("fsdp"), 8).activations >= network.update_bytes(1, 8)


def test_several_nodes_can_share_weights_within_each(counted, planned):
    """hsdp: memory as on one node, and less traffic to the others than fsdp as soon as weights are gathered often."""
    config = PlanConfig(gpus=32, launch_time=(1e-9, 1e-9), network_speed=0.01, gpu_memory=0.14)
    found = {(e.layout.parallel, e.layout.checkpoint): e for e in Step(counted, config, 64).options()}
    assert {mode for mode, _ in found} == {"ddp", "fsdp", "hsdp"}
    (fsdp, hsdp), ddp = (found[mode, False] for mode in ("fsdp", "hsdp")), found["ddp", False]
    assert fsdp.microbatch == hsdp.microbatch < 64 and fsdp.seconds[1] > hsdp.seconds[1]
    on_node = step(counted, 64, gpus=8).memory(Layout("fsdp"), hsdp.microbatch)
    assert hsdp.memory == on_node and fsdp.memory.weights < hsdp.memory.weights < ddp.memory.weights
    assert "| hsdp     | False" in str(planned("--gpus", "16")) and "hsdp" not in str(planned("--gpus", "8"))


def test_less_memory_means_smaller_micro_batches(planned, counted):
    need = step(counted, gpus=8).memory(Layout(), 4).total / 2**30
    plenty, little = planned(), planned("--gpu_memory", str(need), "--reserve", "0")
    sizes = {(each.layout.parallel, each.layout.checkpoint): each.microbatch for each in little.found}
    assert plenty.best.microbatch == 16 and sizes["ddp", False] == 4 < sizes["ddp", True]
    assert all(each.memory.total <= little.config.usable for each in little.found if each.fits)
    with pytest.raises(InputError, match="use more --gpus"):
        planned("--gpu_memory", "0.001")


# ---------------------------------------------------------------------------------------------- what follows, by hand


def test_money_energy_and_the_budget(planned):
    found = planned("--price", "2,3", "--power", "500,1000", "--budget", "100")
    short, long = (1000 * seconds / 3600 for seconds in found.best.seconds)
    assert found.steps == 1000 and found.hours(1000) == (short, long)
    assert found.dollars(1000) == pytest.approx((8 * short * 2, 8 * long * 3))
    assert found.kilowatt_hours(1000) == pytest.approx((8 * short / 2, 8 * long))
    least, most = found.affordable
    assert found.dollars(least)[1] <= 100 < found.dollars(least + 1)[1]
    assert found.dollars(most)[0] <= 100 < found.dollars(most + 1)[0]
    assert f"$100 pay for {least:,} to {most:,} steps" in str(found)
    assert found.flops == 8 * 16 * found.step.networks[0].training_flops(found.best.layout.checkpoint)


def test_more_gpus_take_fewer_steps_for_the_same_samples(planned):
    flags = ["--iterations", "0", "--samples", "100000"]
    steps = [planned("--gpus", gpus, *flags).steps for gpus in ("1", "4", "16")]
    assert steps == [math.ceil(100_000 / 16 / gpus) for gpus in (1, 4, 16)]
    larger = planned("--global_batch", "1024", *flags)
    assert (larger.step.batch, larger.images, larger.steps) == (128, 1024, 98)


def test_data_and_disk(planned):
    found = planned("--images", "1e6", "--sample_kb", "100", "--shard_mb", "50", "--decode_rate", "10")
    assert found.shards == 2000 and planned("--images", "10").shards == 8
    assert found.workers == math.ceil(found.images_per_second / 8 / 10)
    assert planned("--decode_rate", "1e9").workers == 1
    assert found.checkpoint_bytes == 16_000_000  # weights, one average, two moments
    assert planned("--save_interval", "300").checkpoints == 4
    assert planned("--save_interval", "300", "--keep_checkpoints", "2").checkpoints == 2
    kept = planned("--save_interval", "300", "--keep_checkpoints", "2", "--backup_interval", "500")
    assert kept.checkpoints == 4
    endless = planned("--iterations", "0", "--hours", "1")
    assert endless.steps is None and endless.checkpoints is None and "set --iterations" in str(endless)


def test_the_text_names_every_assumption(planned):
    found = planned("--images", "1e6", "--gpus", "16")
    text = str(found)
    for name in (
        "utilization",
        "reserve",
        "network_speed",
        "power",
        "price",
        "sample_kb",
        "decode_rate",
        "launch_time",
    ):
        assert f"(--{name})" in text
    for words in (
        "| weights ",
        "| activations ",
        "| days ",
        "| energy, kWh ",
        "| cost, US dollars ",
        "--microbatch ",
    ):
        assert words in text
    settings = "--parallel ddp --use_checkpoint False --batch_size 16 --microbatch 16 --num_workers"
    assert f"Settings: {settings} {found.workers}\n" in text
    assert "| activations  | 4.00 " in str(dataclasses.replace(found, best=option()))
    assert "--parallel hsdp --use_checkpoint False" in str(dataclasses.replace(found, best=option("hsdp")))
    calibrated = planned()
    calibrated = dataclasses.replace(calibrated, step=dataclasses.replace(calibrated.step, calibrated=3e9))
    assert "3.0 GFLOP/s that ten steps reached" in str(calibrated) and "(--utilization)" not in str(calibrated)


@pytest.mark.slow
def test_settings_of_a_file_alone_are_said_as_such(tmp_path):
    """A decoder on one GPU has no flag among them."""
    found = plan(parse_plan([*benchmark.flags_of("decoder_tiny", {}, str(tmp_path)), "--gpus", "1"]))
    (line,) = [line for line in found.splitlines() if line.startswith("Settings: ")]
    assert line.startswith("Settings: a GPU, in the file's own terms: checkpoint_during_training False, batch_size 16")


def test_the_script_plans():
    text = run_script("info.py", "plan", *GENERATOR, "--gpus", "1", "--batch_size", "4").stdout
    assert re.match(r"A generator of [\d.]+ M parameters on 1 × h100 \(79 GiB", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gpus 0", "gpus is 0, but must be at least 1"),
        ("--gpus 12", "gpus is 12, but must be a multiple of --gpus_per_node (8)"),
        ("--global_batch 100", "global_batch is 100, but must be a multiple of --gpus (8)"),
        ("--reserve 1", "reserve is 1, but"),
        ("--utilization 0.5", "utilization is 0.5, but must be LOWEST,HIGHEST"),
        ("--utilization 0.5,1.5", "but must be at most 1"),
        ("--price 3,2", "price is 3.0,2.0, but must be LOWEST,HIGHEST"),
        ("--power 0,2", "power is"),
        ("--budget -1", "budget is -1, but must be at least 0"),
        ("--decode_rate 0", "decode_rate is 0, but must be above 0"),
    ],
)
def test_refusals_are_one_sentence(flags, words):
    with pytest.raises(InputError) as error:
        parse_plan([*PLANNED, *flags.split()])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_calibration_without_data_is_refused():
    with pytest.raises(InputError, match="data_dir is required"):
        plan(parse_plan([*PLANNED, "--calibrate", "True"]))
