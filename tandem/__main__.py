"""Command line: `tandem <command>`, or `python -m tandem <command>`."""

import sys
from collections.abc import Sequence

OTHERS = {
    "serve": "serve a model on this machine; `tandem serve --help` lists the options",
    "gpu-report": "measure the workers on a GPU, without Ray; `--small` runs the code on a CPU",
    "fuzz": "try extreme but legal requests: exact with drafts, and nobody else harmed",
}
"""Commands beside those of `tandem.commands`, and what they do."""


INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # also in the seconds that imports take
        return INTERRUPTED


def _run(words: list[str]) -> int:
    # imported where they are used: each takes seconds
    if words[:1] == ["serve"]:
        from tandem.serve import serve

        return serve(words[1:])
    if words[:1] == ["fuzz"]:
        from tandem.fuzz.cli import main as run_fuzz

        return run_fuzz(words[1:])
    if words[:1] == ["gpu-report"]:
        from tandem.gpu_report.cli import main as run_gpu_report

        return run_gpu_report(words[1:])
    from tandem.commands import run_command

    return run_command(words, others=OTHERS)


if __name__ == "__main__":
    sys.exit(main())
