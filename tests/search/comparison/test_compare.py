"""The comparison on fakes: interleaved, resumable, paired, and honest about who pays for what."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerskip import DecodeConfig
from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.command_line.cli import CommandError
from layerskip.config import usual_lookups
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import lookup_alone
from search.compare import build_parser, main, make_plan
from search.comparison import confirm
from search.comparison.accounting import Account, Ledger, SharedDecoder, TimedProposer
from search.comparison.journal import Journal
from search.comparison.pipeline import ComparisonRun, as_before
from search.comparison.plan import ComparisonPlan, estimate
from search.comparison.record import FILE, read_record
from search.comparison.results import _versus, t_mean
from search.context import Tools
from search.measure.pairs import PromptCase, time_able
from search.measure.subject import Subject
from search.rivals import STRATEGIES, StrategyInfo
from search.rivals.blind import EarlyExitGrid
from search.rivals.by_throughput import LeaveOneOut
from search.stop import StopSignal
from search.study.fingerprint import FingerprintMismatch
from search.study.space import SearchSpace
from search.terminal.reporter import Reporter
from tests.search.helpers.fakes import (
    FINGERPRINT,
    MODEL,
    NUM_LAYERS,
    SPACE,
    FakeClock,
    FakeDecoder,
    make_spec,
    prompts,
    true_speedup,
)
from tests.search.helpers.rivals import FORCING_S, READING_S, ReadableDecoder, make_setup

NGRAMS = lookup_alone(NUM_LAYERS, usual_lookups.NGRAMS)
VOLATILE = ("process", "seconds", "proposing_s")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something simple in the place of ours."""
    info = StrategyInfo("ours", "stand-in", "-", LeaveOneOut)
    monkeypatch.setitem(STRATEGIES, "ours", info)


def plan_of(**changes: Any) -> ComparisonPlan:
    fields: dict[str, Any] = {
        "strategies": ("ours", "random", "layerskip"),
        "seeds": (0, 1),
        "trials": 5,
        "checkpoints": (2, 5),
        "confirm_repeats": 2,
    }
    return ComparisonPlan(**(fields | changes))


@dataclass
class Comparison:
    """A comparison on fakes in a folder."""

    out: Path
    decoder: ReadableDecoder = field(default_factory=ReadableDecoder)
    stop: StopSignal = field(default_factory=StopSignal)
    output: io.StringIO = field(default_factory=io.StringIO)
    reporter: Reporter | None = None
    """Tells plain lines to `output` if it is not given."""
    space: SearchSpace = SPACE

    def run(self, plan: ComparisonPlan | None = None, *, named: bool = True, fingerprint: Any = FINGERPRINT) -> int:
        subject = Subject(self.decoder, self.space, prompts(12), prompts(6, first=500), fingerprint, MODEL)
        tools = Tools(self.reporter or Reporter(self.output), self.stop, "python -m search.compare", self.decoder.clock)
        return ComparisonRun(plan or plan_of(), subject, make_spec(), self.out, tools).run(named=named)

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = json.loads((self.out / "results.json").read_text())
        return results

    def trials(self) -> list[dict[str, Any]]:
        return Journal(self.out / "trials.jsonl").read()

    def history(self) -> dict[tuple[str, int], list[Any]]:
        """Per run its trials without what differs between two runs of the same thing."""
        runs: dict[tuple[str, int], list[Any]] = {}
        for one in self.trials():
            attrs = {name: value for name, value in one["user_attrs"].items() if name not in VOLATILE}
            kept = (one["number"], one["state"], one["value"], one["params"], attrs, one["steps"])
            runs.setdefault((one["strategy"], one["seed"]), []).append(kept)
        return runs


@pytest.fixture
def bench(tmp_path: Path, stand_in: None) -> Comparison:
    return Comparison(tmp_path / "compare")


def test_confirms_every_runs_leader_at_every_checkpoint(bench: Comparison) -> None:
    assert bench.run() == 0
    results = bench.results()
    assert list(results["strategies"]) == ["ours", "random", "layerskip"]
    for strategy in results["strategies"].values():
        assert [row["trials"] for row in strategy["checkpoints"]] == [2, 5]
        for row in strategy["checkpoints"]:
            assert [one["seed"] for one in row["seeds"]] == [0, 1]
            logs = []
            for one in row["seeds"]:
                config = SPACE.to_config(json.loads(one["pick"]))
                assert one["speedup"] == pytest.approx(true_speedup(config), rel=0.03)
                logs.append(math.log(one["speedup"]))
            assert row["speedup"] == pytest.approx(math.exp(sum(logs) / 2))
            assert row["speedup_ci_low"] <= row["speedup"] <= row["speedup_ci_high"]
            assert row["tokens_per_s"] == pytest.approx(row["speedup"] * results["plain_tokens_per_s"])
    assert results["command"] == "python -m search.compare"
    assert results["fingerprint"]["weights"] == "abc"
    assert results["plan"]["trials"] == 5
    table = (bench.out / "table.md").read_text()
    assert table in bench.output.getvalue()
    assert table.count("| layerskip |") == 2
    page = (bench.out / "plot.html").read_text()
    for text in ("confirmed speedup over plain decoding", "measured trials", "seconds of searching", "layerskip"):
        assert text in page


def test_picks_are_confirmed_a_few_at_a_time(bench: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding first, at most six picks beside it, who is together changing from prompt to prompt."""
    groups: list[tuple[Any, ...]] = []

    def watched(decoder: FakeDecoder, case: PromptCase, configs: Any) -> Any:
        groups.append((case.prompt_ids, *configs))
        return time_able(decoder, case, configs)

    plan = plan_of(strategies=("random",), seeds=tuple(range(9)), trials=1, checkpoints=(1,), confirm_repeats=1)
    bench.run(plan)
    (bench.out / "confirm.jsonl").unlink()
    monkeypatch.setattr(confirm, "time_able", watched)
    bench.run(plan)
    assert [len(group) - 2 for group in groups] == [6, 4] * 6
    assert all(not group[1].speculates for group in groups)
    assert all(one.speculates for group in groups for one in group[2:])
    firsts = {frozenset(group[2:]) for group in groups[::2]}
    assert len(firsts) > 3
    of_the_first = [one for group in groups[:2] for one in group[2:]]
    assert len(set(of_the_first)) == 10
    assert NGRAMS in of_the_first


def test_ngrams_are_confirmed_beside_the_picks(bench: Comparison) -> None:
    """By default, as one row of their own without seeds and trials."""
    bench.run()
    results = bench.results()
    row = results["ngrams"]
    assert row["config"] == "prompt_lookup of 2 or more tokens, gamma 10"
    assert row["speedup"] == pytest.approx(true_speedup(NGRAMS), rel=0.03)
    ratios = results["picks"][row["pick"]]["ratios"]
    mean = t_mean([math.log(ratio) for ratio in ratios])
    # Kept ratios have five decimals.
    found = [row[name] for name in ("speedup", "speedup_ci_low", "speedup_ci_high")]
    assert found == pytest.approx([mean.value, mean.low, mean.high], rel=1e-4)
    assert row["tokens_per_s"] == pytest.approx(row["speedup"] * results["plain_tokens_per_s"])
    ours = results["strategies"]["ours"]["checkpoints"][-1]
    assert row["vs_ours"]["ratio"] == pytest.approx(row["speedup"] / ours["speedup"])
    assert len(ratios) == results["num_held_out_prompts"] == 6
    lines = (bench.out / "table.md").read_text().splitlines()
    (line,) = [one for one in lines if "| ngrams |" in one]
    assert line == lines[2]
    assert line.startswith(
        f"| - | ngrams | {mean.value:.3f} ({mean.low:.3f}..{mean.high:.3f}) | {row['tokens_per_s']:.1f} |"
    )
    versus = row["vs_ours"]
    assert f"| - | - | {versus['ratio']:.3f} ({versus['prompts_low']:.3f}..{versus['prompts_high']:.3f})" in line
    assert versus["prompts_low"] != versus["low"]
    assert lines[-1].startswith("ngrams: no strategy but the usual lookup")
    assert '"text":"ngrams"' in (bench.out / "plot.html").read_text()


@pytest.mark.parametrize(("is_wrong", "code"), [(False, 0), (True, 1)])
def test_ngrams_that_cannot_be_decoded_have_an_empty_row(bench: Comparison, is_wrong: bool, code: int) -> None:
    """And are a violation where their output is another; the strategies have their numbers all the same."""
    if is_wrong:
        bench.decoder.wrong_on = lambda config: config == NGRAMS
    else:
        bench.decoder.break_on = lambda config: RuntimeError("no tape") if config == NGRAMS else None
    assert bench.run() == code
    results, table = bench.results(), (bench.out / "table.md").read_text()
    reason = "not lossless" if is_wrong else "RuntimeError: no tape"
    assert results["ngrams"]["speedup"] is None
    assert [reason in one for one in results["violations"]] == [True] * code
    assert "| - | ngrams | - | - | - | - | - |" in table
    assert f"ngrams has no numbers: {reason}" in table
    assert all(not one["is_plain"] for one in results["strategies"]["ours"]["checkpoints"][-1]["seeds"])
    assert '"text":"ngrams"' not in (bench.out / "plot.html").read_text()


def test_the_pick_is_the_leader_of_the_first_trials_alone(bench: Comparison) -> None:
    bench.run()
    first = bench.results()["strategies"]["random"]["checkpoints"][0]["seeds"][0]
    tried = [one["params"] for one in bench.trials() if (one["strategy"], one["seed"]) == ("random", 0)]
    assert json.loads(first["pick"]) in tried[:2]


def test_runs_take_turns_of_three(bench: Comparison) -> None:
    bench.run(plan_of(trials=7))
    order = [(one["strategy"], one["seed"]) for one in bench.trials()]
    runs = [("ours", 0), ("random", 0), ("layerskip", 0), ("ours", 1), ("random", 1), ("layerskip", 1)]
    assert order[:18] == [run for run in runs for _ in range(3)]
    assert order[18:36] == [run for run in (*runs[1:], runs[0]) for _ in range(3)]
    assert order[36:] == [*runs[2:], *runs[:2]]


def test_all_runs_see_the_same_prompts_first(bench: Comparison) -> None:
    bench.run()
    firsts = {tuple(one["user_attrs"]["prompt_steps"]) for one in bench.trials() if one["number"] == 0}
    assert firsts == {(0, 1, 2, 3, 4)}


@pytest.mark.parametrize("stops", [(0.3, 0.1), (0.001, 0.01, 0.5, 0.4)])
def test_resumed_equals_uninterrupted(
    bench: Comparison, stops: tuple[float, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ctrl-C after that share of the decodings, in the reference, a trial or the confirm stage, and the same again."""
    whole = Comparison(tmp_path_factory.mktemp("whole") / "compare")
    assert whole.run() == 0
    for share in stops:
        bench.decoder.break_on = interrupt_after(bench.decoder, round(share * whole.decoder.num_decoded))
        with pytest.raises(KeyboardInterrupt):
            bench.run()
    assert (bench.out / "confirm.jsonl").exists() == (sum(stops) >= 0.9)
    bench.decoder.break_on = lambda _config: None
    assert bench.run() == 0
    assert bench.history() == whole.history()
    for name, strategy in whole.results()["strategies"].items():
        for row, resumed in zip(
            strategy["checkpoints"], bench.results()["strategies"][name]["checkpoints"], strict=True
        ):
            assert row["speedup"] == resumed["speedup"]
            assert row["seconds"] == pytest.approx(resumed["seconds"])
            assert row.get("vs_ours") == resumed.get("vs_ours")
    assert (bench.out / "confirm.jsonl").read_text().count("\n") == (whole.out / "confirm.jsonl").read_text().count(
        "\n"
    )


def interrupt_after(decoder: FakeDecoder, count: int) -> Callable[[DecodeConfig], Any]:
    last = decoder.num_decoded + count
    return lambda _config: KeyboardInterrupt() if decoder.num_decoded >= last else None


def test_a_finished_comparison_measures_nothing_again(bench: Comparison) -> None:
    bench.run()
    before, results = bench.decoder.num_decoded, bench.results()
    assert bench.run() == 0
    assert bench.decoder.num_decoded - before == 2 + 6 + 1, "warm-up, the target's continuations, n-grams' warm-up"
    assert bench.results()["strategies"] == results["strategies"]


def test_more_trials_seeds_and_strategies_go_on_from_what_is_there(bench: Comparison) -> None:
    bench.run()
    before = bench.history()
    bench.run(
        plan_of(trials=6, checkpoints=(6,), seeds=(0, 1, 2), strategies=("ours", "random", "layerskip", "raw-tpe"))
    )
    after = bench.history()
    assert len(after) == 12
    assert all(len(one) == 6 for one in after.values())
    assert {key: one[:5] for key, one in after.items() if key in before} == before


def test_a_line_torn_by_a_kill_is_cut_off(bench: Comparison) -> None:
    bench.run()
    history = bench.history()
    with (bench.out / "trials.jsonl").open("a") as file:
        file.write('{"strategy": "random", "se')
    bench.run(plan_of(trials=6, checkpoints=(6,)))
    assert {key: one[:5] for key, one in bench.history().items()} == history


def test_a_broken_journal_is_refused_by_line(bench: Comparison) -> None:
    bench.run()
    file = bench.out / "trials.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], "nonsense\n", *lines[1:]]))
    with pytest.raises(ValueError, match=r"trials\.jsonl: line 2 is not a JSON object"):
        bench.run()
    file.write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2: number: expected trial 1, got 2"):
        bench.run()


def test_another_fingerprint_is_refused(bench: Comparison) -> None:
    bench.run()
    assert as_before(make_spec(), bench.out).engine == "eager"
    assert as_before(make_spec(), bench.out.parent / "new").engine == "auto"
    with pytest.raises(FingerprintMismatch, match=r"dtype was 'float32', now 'bfloat16'.*--out"):
        bench.run(fingerprint=dataclasses.replace(FINGERPRINT, dtype="bfloat16"))


def test_an_unlossless_config_never_wins_and_is_told(bench: Comparison) -> None:
    bench.decoder.wrong_on = lambda config: config.skip_mask.exit_layer == 5
    assert bench.run(plan_of(trials=12, strategies=("ours", "layerskip"), checkpoints=(12,))) == 1
    results = bench.results()
    assert any(line.startswith("layerskip") for line in results["violations"])
    for row in results["strategies"]["layerskip"]["checkpoints"][0]["seeds"]:
        assert SPACE.to_config(json.loads(row["pick"])).skip_mask.exit_layer != 5
    assert "NOT LOSSLESS" in bench.output.getvalue()


def test_a_pick_that_fails_when_confirmed_counts_as_plain_decoding(bench: Comparison) -> None:
    """It is what its run would export; and the broken config is measured no further."""
    bench.run(plan_of(trials=3, checkpoints=(3,)))
    worst = bench.results()["strategies"]["layerskip"]["checkpoints"][0]["seeds"][0]
    (bench.out / "confirm.jsonl").unlink()
    bad = SPACE.to_config(json.loads(worst["pick"]))
    bench.decoder.break_on = lambda config: RuntimeError("out of memory") if config == bad else None
    assert bench.run(plan_of(trials=3, checkpoints=(3,))) == 0
    results = bench.results()
    seed = results["strategies"]["layerskip"]["checkpoints"][0]["seeds"][0]
    assert (seed["speedup"], seed["is_plain"]) == (1.0, True)
    assert "out of memory" in results["picks"][worst["pick"]]["excluded"]
    assert (bench.out / "confirm.jsonl").read_text().count("out of memory") == 1


def test_trials_that_all_fail_end_the_comparison(bench: Comparison) -> None:
    bench.decoder.break_on = lambda config: RuntimeError("no more tape") if config.gamma > 1 else None
    with pytest.raises(CommandError, match=r"trials in a row failed.*no more tape"):
        bench.run(plan_of(trials=20, strategies=("random",)))


def test_without_states_named_strategies_are_refused_and_others_left_out(bench: Comparison) -> None:
    bench.decoder.has_states = False
    plan = plan_of(strategies=("ours", "clasp", "knapspec"), trials=2, checkpoints=(2,))
    with pytest.raises(ValueError, match=r"--strategies: clasp, knapspec: hidden states"):
        bench.run(plan)
    assert bench.run(plan, named=False) == 0
    assert list(bench.results()["strategies"]) == ["ours"]
    assert "left out" in bench.output.getvalue()


def test_seconds_are_what_the_clock_says(bench: Comparison) -> None:
    """Proposals and measurements apart, and their sum; preparation is paid by each seed, though it was done once."""
    bench.run()
    by_run: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in bench.trials():
        by_run.setdefault((one["strategy"], one["seed"]), []).append(one)
    for (name, _), trials in by_run.items():
        preparation = FORCING_S + 12 * READING_S if name == "ours" else 0.0
        assert [one["proposal_s"] for one in trials] == pytest.approx([preparation, 0, 0, 0, 0])
        total = 0.0
        for one in trials:
            assert 0 < one["measure_s"] < 20
            total += one["proposal_s"] + one["measure_s"]
            assert one["seconds"] == pytest.approx(total)
    (forcing,) = bench.decoder.forcings
    assert forcing.num_readings == 12


def test_a_resume_does_not_charge_preparation_twice(bench: Comparison) -> None:
    bench.run(plan_of(strategies=("ours",), trials=2, checkpoints=(2,)))
    bench.run(plan_of(strategies=("ours",), trials=4, checkpoints=(4,)))
    charged = [one["proposal_s"] for one in bench.trials() if one["seed"] == 0]
    assert charged == pytest.approx([FORCING_S + 12 * READING_S, 0.0, 0.0, 0.0])


def test_memory_that_is_dropped_between_turns_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is measured nor who pays for what; the real one drops beyond 512 MiB, here all that it can."""
    plan = plan_of(strategies=("ours", "leave-one-out", "clasp", "del+settings"), trials=7, checkpoints=(7,))
    roomy, tight = (Comparison(tmp_path / name) for name in ("roomy", "tight"))
    assert roomy.run(plan) == 0
    left: list[int] = []
    trim = Ledger.trim

    def trim_all(self: Ledger) -> None:
        self._most_bytes = 0
        trim(self)
        left.append(self.num_bytes)

    monkeypatch.setattr(Ledger, "trim", trim_all)
    assert tight.run(plan) == 0
    assert tight.history() == roomy.history()
    paid = [[one["proposal_s"] for one in bench.trials()] for bench in (roomy, tight)]
    assert paid[1] == pytest.approx(paid[0])
    assert len(left) >= 6
    assert set(left) == {0}
    assert len(tight.decoder.forcings) > len(roomy.decoder.forcings)


def test_readings_are_shared_and_step_times_are_not() -> None:
    decoder, ledger = ReadableDecoder(), Ledger()
    texts = [ForcedText((1, 2), (3, 4, 5))]
    mask = SkipMask.none(NUM_LAYERS)
    accounts = [Account(ledger, decoder.clock) for _ in range(2)]
    for account in accounts:
        forcing = SharedDecoder(decoder, account).teacher_forcing(texts)
        assert forcing.read(mask, 1).accepted.shape == (2, 1, 3)
        forcing.read(mask, 0)
        forcing.read(mask, 0)
    assert [one.num_readings for one in decoder.forcings] == [2]
    assert [account.now() for account in accounts] == pytest.approx(
        [FORCING_S + 2 * READING_S, 2 * (FORCING_S + 2 * READING_S)]
    )


def test_a_signal_interrupts_a_long_proposal() -> None:
    stop = StopSignal()
    proposer = TimedProposer(EarlyExitGrid(make_setup(SPACE)), Account(Ledger(), FakeClock()), stop)
    stop.received = 2
    with stop.deferred(), pytest.raises(KeyboardInterrupt):
        proposer.propose([], 0, np.random.default_rng(0))
    assert proposer.seconds == 0.0


def test_t_mean_by_hand() -> None:
    mean = t_mean([math.log(one) for one in (1.0, 2.0, 4.0)])
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert mean.value == pytest.approx(2.0)
    assert (mean.low, mean.high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))
    assert t_mean([0.1]).low is None
    assert t_mean([0.0, 0.0]) == type(mean)(1.0, 1.0, 1.0)


def test_a_difference_counts_only_beyond_seeds_and_prompts() -> None:
    """Two strategies that always pick the same two configs have no spread over seeds; prompts must speak too."""
    steady = np.full((5, 6), math.log(1.4))
    by_prompt = np.array([0.3, -0.25, 0.3, -0.2, 0.1, -0.1])
    assert _versus(steady + 0.01, steady)["outside"]
    unsure = _versus(steady + by_prompt, steady)
    assert unsure["ratio"] == pytest.approx(math.exp(by_prompt.mean()))
    assert not unsure["outside"]
    by_seed = np.array([0.3, -0.25, 0.3, -0.2, 0.1])[:, None]
    assert not _versus(steady + by_seed, steady)["outside"]


OURS = {"strategies": ("ours", "random"), "trials": 4, "checkpoints": (4,)}


def test_ours_is_set_up_as_in_a_study(tmp_path: Path) -> None:
    """Its own pool per seed, predictions beside each trial, and all of that in its seconds."""
    bench = Comparison(tmp_path / "compare")
    assert bench.run(plan_of(**OURS)) == 0
    trials = {(one["strategy"], one["seed"], one["number"]): one for one in bench.trials()}
    assert "forecast_ratios" in trials["ours", 0, 0]["user_attrs"]
    assert "forecast_ratios" not in trials["random", 0, 0]["user_attrs"]
    for seed in (0, 1):
        first, *later = (trials["ours", seed, number]["proposal_s"] for number in range(4))
        assert first > FORCING_S + 37 * READING_S, "a teacher forcing, three readings a bit, one, and a pool"
        assert max(later) < FORCING_S
    stored = [json.loads((bench.out / f"ours-{seed}.json").read_text()) for seed in (0, 1)]
    assert stored[0]["attributes"]["pool"] != stored[1]["attributes"]["pool"]
    assert [one["unpaid_s"] for one in stored] == [0.0, 0.0]
    forcings = bench.decoder.forcings
    assert len({one.texts for one in forcings}) == len(forcings) == 3, "one of the same texts for all runs"


@pytest.mark.parametrize("share", [0.45, 0.6])
def test_ours_resumed_equals_uninterrupted(share: float, tmp_path: Path) -> None:
    whole, bench = Comparison(tmp_path / "whole"), Comparison(tmp_path / "parts")
    assert whole.run(plan_of(**OURS)) == 0
    bench.decoder.break_on = interrupt_after(bench.decoder, round(share * whole.decoder.num_decoded))
    with pytest.raises(KeyboardInterrupt):
        bench.run(plan_of(**OURS))
    first = sum(one.num_readings for one in bench.decoder.forcings)
    bench.decoder.break_on = lambda _config: None
    assert bench.run(plan_of(**OURS)) == 0
    assert bench.history() == whole.history()
    for one, other in zip(sorted_trials(whole), sorted_trials(bench), strict=True):
        assert one["seconds"] == pytest.approx(other["seconds"], abs=1.0), "a few readings are made again"
    second = sum(one.num_readings for one in bench.decoder.forcings) - first
    assert second < 0.6 * first, "what was predicted is stored"


def sorted_trials(bench: Comparison) -> list[dict[str, Any]]:
    return sorted(bench.trials(), key=lambda one: (one["strategy"], one["seed"], one["number"]))


def test_a_broken_store_of_ours_is_named(tmp_path: Path) -> None:
    bench = Comparison(tmp_path / "compare")
    bench.run(plan_of(**OURS))
    (bench.out / "ours-1.json").write_text("{")
    with pytest.raises(ValueError, match=r"ours-1\.json: not what a comparison stored"):
        bench.run(plan_of(**(OURS | {"trials": 5, "checkpoints": (5,)})))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategies", "ours,klasp"], "'klasp'; did you mean 'clasp'?"),
        (["--strategies", "magic"], "ours, random, raw-tpe, draft-verify, layerskip, del, swift, clasp, knapspec"),
        (["--strategies", "random,random"], "must name each strategy once"),
        (["--strategies", ","], "must name at least one"),
        (["--seeds", "1"], "--seeds: must be at least 2, or there is no interval, got 1"),
        (["--trials", "0"], "--trials: must be at least 1, got 0"),
        (
            ["--trials", "10", "--checkpoints", "5,11"],
            "--checkpoints: must be in 1..10, the number of trials, got 5,11",
        ),
        (["--checkpoints", "10,5"], "--checkpoints: must ascend, got 10,5"),
        (["--checkpoints", "a"], "--checkpoints: must be whole numbers, got 'a'"),
        (["--study", "/no/such/study"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: list[str], message: str, refused: Any) -> None:
    assert message in refused(main, flags)


@pytest.mark.parametrize(
    ("flags", "checkpoints"),
    [([], (5, 10, 25)), (["--trials", "8"], (5, 8)), (["--trials", "3"], (3,)), (["--checkpoints", "2,4"], (2, 4))],
)
def test_checkpoints_follow_from_the_trials(flags: list[str], checkpoints: tuple[int, ...]) -> None:
    plan = make_plan(build_parser().parse_args(flags), make_spec(seed=7))
    assert plan.checkpoints == checkpoints
    assert plan.seeds == (7, 8, 9, 10, 11)
    assert plan.strategies == tuple(STRATEGIES)


def test_a_gamma_limit_that_does_not_fit_is_lowered_for_all_strategies(bench: Comparison) -> None:
    bench.space = dataclasses.replace(SPACE, gamma_max=16)
    assert bench.run() == 0
    assert "gamma 1..15 instead of 1..16: the longest continuation has 17 tokens" in bench.output.getvalue()
    assert read_record(bench.out / FILE).space.gamma_max == 15
    again = Comparison(bench.out, space=bench.space)
    assert again.run() == 0, "the journal is of that space"


def test_the_estimate_says_what_it_would_take() -> None:
    subject = Subject(FakeDecoder(), SPACE, prompts(12), prompts(6, first=500), FINGERPRINT, MODEL)
    line = estimate(plan_of(), subject, make_spec(), FakeClock())
    assert "3 strategies x 2 seeds x 5 trials of up to 5 prompts: at most about 0:48" in line
    assert "up to 13 picks, n-grams among them, on 6 held-out prompts x 2: at most about 0:50" in line


@pytest.mark.slow
def test_the_command_from_end_to_end(tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from search.run import main as search

    assert search([*tiny_study, "--trials", "1"]) == 0
    flags = ["--study", str(tmp_path / "study"), "--strategies", "ours,swift,clasp,knapspec", "--seeds", "2"]
    flags += ["--trials", "2", "--confirm-repeats", "1"]
    assert main([*flags, "--dry-run"]) == 0
    assert not (tmp_path / "study" / "compare").exists()
    assert main(flags) == 0
    results = json.loads((tmp_path / "study" / "compare" / "results.json").read_text())
    assert results["strategies"]["clasp"]["checkpoints"][0]["trials"] == 2
    assert "| 2 | knapspec |" in capsys.readouterr().out
