"""Watch runs train, on a page in the browser: losses by noise level, caption-swap gap, image grids through time,
throughput and the time left. Several runs are compared. Their folders are only read."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.watch import parse_watch
from diff_dalle.distributed.launch import run_script


def main():
    config = parse_watch(description=__doc__)
    from diff_dalle.web.watch import serve_watch  # loads gradio

    serve_watch(config)


if __name__ == "__main__":
    run_script(main)
