"""`python -m tandem.fuzz`."""

import argparse
import logging
import sys

from tandem.fuzz.cli import add_options


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tandem.fuzz", description=__doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line per request
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
