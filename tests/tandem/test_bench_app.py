"""The benchmarks of an app, in whose place a scripted one answers."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster import bundled
from tandem.bench import app, lookup, traffic
from tandem.live.client import Endpoint, Load, LoadResult
from tandem.live.counters import Counters
from tests.tandem.results import make_result, usages

TARGET, DRAFT = (bundled.resolve(name) for name in (bundled.TARGET_NAME, bundled.DRAFT_NAME))


class ScriptedServer:
    """An app that answers at once."""

    endpoint = Endpoint(url="", model="m")

    def __init__(self) -> None:
        self.gammas: list[int | str] = []
        self.loads: list[Load] = []

    def set_gamma(self, gamma: int | str) -> None:
        self.gammas.append(gamma)

    def run(self, load: Load, *, concurrency: int) -> LoadResult:
        self.loads.append(load)
        rounds = [(1, 0, 0), *((n, 2 * n, 4 * n) for n in range(2, 40))]
        return make_result(50.0 / concurrency, usages(*rounds))

    def counters(self) -> Counters:
        return Counters({"spec_decode_num_drafts": float(len(self.loads))})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """What the benchmarks measure in place of an app that they would start."""
    server = ScriptedServer()
    for module in (app, lookup, traffic):
        monkeypatch.setattr(module, "measured_app", lambda *_, **__: nullcontext(server))
    return server


class TestApp:
    def test_gammas_take_turns_on_one_app(self, scripted: ScriptedServer, tmp_path: Path) -> None:
        table = app.run(app.Options(output=tmp_path, repeats=2, num_prompts=3))
        assert scripted.gammas == [0, 4, "dynamic"] * 3  # the first to warm up
        assert [len(load.prompts) for load in scripted.loads] == [2] * 3 + [3] * 6
        assert len({load.salt for load in scripted.loads}) == 9
        assert table.count("\n") == 2 + 3
        (page,) = tmp_path.glob("*.md")
        assert "## `tandem bench app --repeats 2 --num-prompts 3`" in page.read_text()

    def test_what_an_interruption_leaves_is_every_complete_repeat(
        self, scripted: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counters = scripted.counters

        def interrupt_the_second_repeat() -> Counters:
            if len(scripted.loads) == 3 + 3 + 2:  # the first three to warm up
                raise KeyboardInterrupt
            return counters()

        monkeypatch.setattr(scripted, "counters", interrupt_the_second_repeat)
        with pytest.raises(KeyboardInterrupt):
            app.run(app.Options(output=tmp_path))
        (data,) = tmp_path.glob("*.json")
        (result,) = json.loads(data.read_text()).values()
        assert [row["tokens_per_s_of_repeats"] for row in result["rows"]] == [[50.0]] * 3

    def test_edited_text_is_predicted_by_what_plain_decoding_wrote(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        app.run(app.Options(output=tmp_path, texts=("edit",), repeats=1, num_prompts=3))
        plain, *measured = scripted.loads
        assert not plain.predictions
        assert len(measured) == 3 + 3
        assert len({tuple(load.predictions) for load in measured}) == 1
        assert measured[0].predictions

    def test_each_mode_is_measured_and_predictions_where_there_are_any(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        options = app.Options(
            output=tmp_path,
            texts=("easy", "edit"),
            gammas=(0, 8),
            modes=("suffix", "predicted"),
            repeats=1,
        )
        app.run(options)
        modes = ["auto", "suffix", "auto", "suffix", "predicted"]
        assert [load.mode for load in scripted.loads[1:]] == modes * 2  # the first to warm up

    def test_without_a_model_none_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[dict[str, str]] = []
        monkeypatch.setattr(
            "tandem.live.server.live_server", lambda options, _: started.append(options)
        )
        for drafter in ("suffix", "suffix,model"):
            app.measured_app(app.Options(target=TARGET), (0,), drafter=drafter)
        assert [options["drafter"] for options in started] == ["suffix", "suffix,model"]
        assert ["draft" in options for options in started] == [False, True]


class TestLookup:
    def test_each_way_is_beside_transformers_prompt_lookup(
        self, scripted: ScriptedServer, tmp_path: Path
    ) -> None:
        options = lookup.Options(
            target=TARGET, num_prompts=2, max_tokens=8, repeats=2, output=tmp_path
        )
        rows = [line.split(" | ") for line in lookup.run(options).splitlines()[2:]]
        assert scripted.gammas == ["dynamic"]
        assert len(scripted.loads) == 3  # the first to warm up
        assert [row[0].strip("| ") for row in rows] == [*lookup.WAYS, "tandem, prompt_lookup"]
        assert rows[1][4] == "1.00"
        assert rows[1][5].startswith("2 of 2")  # as plain decoding


class TestTraffic:
    def test_one_controller_sees_all_texts(self, scripted: ScriptedServer, tmp_path: Path) -> None:
        table = traffic.run(traffic.Options(output=tmp_path, num_prompts=2))
        assert scripted.gammas == ["dynamic"]  # before, gamma 0 to warm up
        assert [len(load.prompts) for load in scripted.loads] == [2] * 4
        assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [*traffic.TEXTS]

    def test_a_round_is_told_by_the_usage_of_its_event(self) -> None:
        rounds = usages((1, 0, 0), (4, 3, 3), (6, 4, 7), (7, 4, 7))
        phase = traffic.make_phase("hard", make_result(5.0, rounds, rounds[:2]))
        assert phase.gammas == (3, 4, 0, 3)
        assert phase.alpha == 7 / 8  # of 3, 1 and 3 accepted, and one rejected

    def test_a_phase_has_settled_once_its_length_stays_near_the_last(self) -> None:
        falling = make_phase(*[6] * 30, *[0] * 200)
        assert falling.settled_gamma == 0
        assert 30 < falling.num_rounds_to_settle <= 30 + traffic.WINDOW
        assert make_phase(*[5] * 50).num_rounds_to_settle == traffic.WINDOW


def make_phase(*gammas: int) -> traffic.Phase:
    return traffic.Phase(text="hard", tokens_per_s=50.0, alpha=0.5, gammas=gammas)
