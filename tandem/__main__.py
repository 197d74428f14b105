"""Command line: `tandem <command>`, or `python -m tandem <command>`."""

import sys
from collections.abc import Sequence

SERVE_HELP = "serve a model on this machine; `tandem serve --help` lists the options"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # imported where they are used: each takes seconds
    if words[:1] == ["serve"]:
        from tandem.serve import serve

        return serve(words[1:])
    from cluster.__main__ import main as run_command

    return run_command(words, program="tandem", others={"serve": SERVE_HELP})


if __name__ == "__main__":
    sys.exit(main())
