"""Sample images from a generator's checkpoint."""

from diff_dalle.command_line import parse
from diff_dalle.data.output import write_samples
from diff_dalle.distributed import launch, run_script
from diff_dalle.pipeline import load
from diff_dalle.sample_run import SampleRun, read_request
from diff_dalle.training.checkpoint import choose_logdir


def main():
    run = parse(SampleRun, description=__doc__)
    what = run.what
    with launch(run.distributed) as world:
        pipeline = load(what.model_path, world.device, what.precision, what.bpe_path)
        pipeline.check(run.model)
        pipeline.check(run.diffusion)
        request = read_request(what)
        images = pipeline.sample(
            request.prompts,
            seeds=request.seeds,
            labels=request.labels,
            negative_prompt=what.negative_prompt,
            size=what.sample_size,
            batch_size=what.batch_size,
            sampler=run.sampler,
            guidance=run.guidance,
            world=world,
        )
        if world.is_main:
            logdir = choose_logdir(what.logdir)
            write_samples(logdir, images, request.prompts, request.seeds)
            print(f"{len(images)} pictures, grid.png, captions.txt and samples.npz are in {logdir}")


if __name__ == "__main__":
    run_script(main)
