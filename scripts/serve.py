"""Serve models on a web page and by an HTTP API: sampling with previews, editing, and how to repeat each image."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.serve import ServeRun
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.web.api import Service
from diff_dalle.web.gradio_setup import load_gradio
from diff_dalle.web.models import Models
from diff_dalle.web.server import serve


def main():
    run = parse(ServeRun, description=__doc__)
    load_gradio()
    with launch(run.distributed) as world:
        serve(Service(Models(run.models, world.device), run.limits), run.address)


if __name__ == "__main__":
    run_script(main)
