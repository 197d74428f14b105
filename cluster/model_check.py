"""Whether the models can be served as the options ask, found out before anything is started.

That takes torch and transformers, which whoever starts an app shall not load: a process of its own
answers, `main`, which reads a Question as JSON from standard input and writes an Answer.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from cluster import bundled
from cluster.found_model import FoundModel, Machine
from cluster.model_files import check_files
from cluster.options import AppArgs
from workers.errors import ConfigError, TandemError

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
RUN = "import sys; sys.path.insert(0, sys.argv[1]); from cluster.model_check import main; main()"
ROOT = Path(__file__).parent.parent


class Question(BaseModel):
    """The app's options, and the machine if everything runs on it."""

    args: AppArgs
    machine: Machine | None


class Answer(BaseModel):
    """Either a sentence about what is wrong, or the target and the draft, if there is one."""

    error: str | None = None
    found: tuple[FoundModel, ...] = ()


def check_models(args: AppArgs, machine: Machine | None) -> Sequence[FoundModel]:
    """Make sure that the models exist and fit each other, the options and the machine.

    Args:
        args: the app's options.
        machine: the one that everything runs on; None where other nodes may run some of it, whose
            folders and memory are not known here.

    Returns: the target, and the draft if there is one; nothing if they could not be sized.
    Raises: ConfigError with a sentence that names the option, its value and the fix.
    """
    question = Question(args=args, machine=machine)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", RUN, str(ROOT)],
            input=question.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        logger.warning("the models were not checked within %.0f s", TIMEOUT_S)
        return ()
    if ended.returncode != 0:  # a fault of the check is no reason not to start
        reason = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        logger.warning("the models could not be checked before the start: %s", reason)
        return ()
    answer = Answer.model_validate_json(ended.stdout.splitlines()[-1])
    if answer.error is not None:
        raise ConfigError(answer.error)
    return answer.found


def main() -> None:
    """Answer the question on standard input."""
    question = Question.model_validate_json(sys.stdin.read())
    sys.stdout.write(f"\n{_answer(question).model_dump_json()}\n")


def _answer(question: Question) -> Answer:
    args = question.args
    sources = {"target": args.target_source, "draft": args.draft_source}
    try:
        for option, source in sources.items():
            if source is None:
                continue
            model = bundled.resolve(source)
            if question.machine is None and not Path(model.name).is_dir():
                return Answer()
            try:
                check_files(model)
            except TandemError as error:
                raise ConfigError(f"{option}: {error}") from None
        # imported once it is needed: transformers takes seconds
        from cluster.model_fit import check_fit

        return Answer(found=tuple(check_fit(args, question.machine)))
    except TandemError as error:
        return Answer(error=" ".join(str(error).split()))


if __name__ == "__main__":
    main()
