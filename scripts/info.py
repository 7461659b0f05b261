"""Say what is in a checkpoint file, or what a network with these settings costs, without allocating it."""

from diff_dalle.commands.info import describe, parse_any
from diff_dalle.distributed.launch import run_script


def main():
    print(describe(parse_any(__doc__)))


if __name__ == "__main__":
    run_script(main)
