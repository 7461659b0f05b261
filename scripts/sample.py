"""Sample images from a generator's checkpoint."""

from diff_dalle import storage
from diff_dalle.command_line import parse
from diff_dalle.data.output import write_samples
from diff_dalle.distributed import launch, run_script
from diff_dalle.pipeline import SampleRun, load, read_prompts


def main():
    run = parse(SampleRun, description=__doc__, read_text=storage.read_text)
    with launch(run.distributed) as world:
        pipeline = load(run.output.model_path, world.device, run.output.precision, run.output.bpe_path)
        pipeline.check(run.expected)
        prompts, seeds = read_prompts(run.output, pipeline)
        images = pipeline.sample(
            prompts, seeds=seeds, size=run.output.sample_size, batch_size=run.output.batch_size, config=run.sampling, world=world
        )
        if world.is_main:
            write_samples(out, images, prompts, seeds)
