"""Sample images from a generator's checkpoint."""

from diff_dalle import storage
from diff_dalle.checkpoints.run_folder import choose_logdir
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun, read_wanted
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.errors import quantity
from diff_dalle.images.output import write_samples, write_sweep
from diff_dalle.sampling.pipeline import load


def main():
    run = parse(SampleRun, description=__doc__)
    what = run.what
    with launch(run.distributed) as world:
        if world.is_main:
            logdir = choose_logdir(what.logdir)
            storage.make_dirs(logdir)  # a folder that cannot be written is better found out now
        wanted = read_wanted(what, run.edit)
        paths = run.upsamplers.upsampler_paths
        pipeline = load(what.model_path, world.device, what.precision, what.bpe_path, upsampler_paths=paths)
        pipeline.check(run.model)
        pipeline.check(run.diffusion)
        if run.classifier.classifier_path:  # looked at here, used by its stage and in memory with that alone
            run.classifier.load(world.device, what.precision, what.bpe_path).check(run.classifier_model)
        made = {}
        for scale in run.classifier.scales:
            made[f"classifier_scale_{scale:g}"] = pipeline.sample(
                wanted.prompts,
                seeds=wanted.seeds,
                labels=wanted.labels,
                negative_prompt=what.negative_prompt,
                size=what.sample_size,
                batch_size=what.batch_size,
                sampler=run.sampler,
                guidance=run.guidance,
                classifier=run.classifier.classifier_path or None,
                classifier_scale=scale,
                classifier_gradient=run.classifier.classifier_gradient,
                upsampling=run.upsamplers.settings(),
                low_res=wanted.low_res,
                edit=wanted.edit,
                world=world,
            )
        if world.is_main:
            if len(made) > 1:
                write_sweep(logdir, made, wanted.prompts, wanted.seeds)
                print(f"{quantity(len(wanted.prompts), 'picture')} for each of {len(made)} scales, and grid.png to "
                      f"compare them, are in {logdir}")  # fmt: skip
            else:
                write_samples(logdir, *made.values(), wanted.prompts, wanted.seeds)
                count = quantity(len(wanted.prompts), "picture")
                print(f"{count}, grid.png, captions.txt and samples.npz are in {logdir}")


if __name__ == "__main__":
    run_script(main)
