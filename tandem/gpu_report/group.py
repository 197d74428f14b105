"""Step 5: one rank of a tensor-parallel group, as far as one device shows it."""

from cluster.tensor_parallel import TensorParallelGroup, open_meeting_point
from tandem.decoding import Decoder
from tandem.gpu_report.findings import Notebook
from tandem.gpu_report.subjects import (
    choose_subjects,
    grown_target,
    make_prompts,
    make_target,
    record_graphs,
    time_sizes,
)
from workers.step_times import Size
from workers.target import Target

TIMED_SIZES: tuple[Size, ...] = ((1, 1), (1, 8), (8, 64))


def run(notebook: Notebook, *, is_small: bool) -> None:
    """Decode and time steps alone, and as the only rank of a group."""
    subjects = choose_subjects(is_small=is_small)
    name = next(iter(subjects.targets))
    model = grown_target(subjects, name)
    prompts = make_prompts(2)
    alone = make_target(model, subjects)
    expected = Decoder(alone).decode(prompts, subjects.num_texts_tokens)
    _time(notebook, alone, "alone, no graphs")
    point, store = open_meeting_point("127.0.0.1", 1)
    group = TensorParallelGroup(point, rank=0, device_type=subjects.device, store=store)
    try:
        ranked = make_target(model, subjects, ranks=group)
        texts = Decoder(ranked).decode(prompts, subjects.num_texts_tokens)
        notebook.note(
            "The texts of the rank are those of the target alone."
            if texts == expected
            else "The texts of the rank DIFFER from those of the target alone."
        )
        _time(notebook, ranked, "rank of a group of one, no graphs")
        if subjects.device == "cuda":
            record_graphs(subjects, ranked)
            way = "rank of a group of one, graphs"
            if ranked.is_compiled:
                _time(notebook, ranked, way)
            else:
                notebook.skip(f"{way}: there are none here")
    finally:
        group.close()
    notebook.note(
        "A group of one announces every step, and exchanges nothing in its layers: what NCCL "
        "takes between devices was not measured."
    )


def _time(notebook: Notebook, target: Target, way: str) -> None:
    if not notebook.has_time(f"steps of a {way}"):
        return
    budget_s = notebook.left_s / 4
    for step in time_sizes(notebook, target, way, TIMED_SIZES, budget_s=budget_s):
        notebook.add(
            "Steps of one rank",
            {
                "way": way,
                "sequences": step.num_sequences,
                "tokens": step.num_tokens,
                "step ms": step.seconds * 1e3,
            },
        )
