"""The proving ground: tables, the decoder on them, exact optima, and a short run of the benchmark."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.teacher_forcing import ForcedText
from search.compact import read_lines
from search.measure.decoder import Decoder
from search.predict.replay import Counts, Settings, replay
from search.study import leaderboard
from search.study.space import THRESHOLD_MAX, THRESHOLD_STEP, SearchSpace, snap_threshold
from search.trials import proposals, replay_proposer
from studies.proving.__main__ import load_tables, main
from studies.proving.ablations import CONSTANTS, left_out
from studies.proving.costs import COSTS, QUIRK
from studies.proving.jobs import in_turns
from studies.proving.make import READINGS
from studies.proving.optima import FILE, fingerprint_of, known_optima
from studies.proving.readings import NUM_REPORTING, NUM_TUNING
from studies.proving.recipes import RECIPES
from studies.proving.runner import Case, run_case
from studies.proving.scores import Score, summarise, table_of
from studies.proving.table import THRESHOLDS, Table, confidence_of, decode, encode, levels_of, masks_of
from studies.proving.tabular import Noise, SimulatedMachine, TabularDecoder, TabularForcing
from studies.proving.truth import GridSteps, Steps, grid_of, optima_of, speedup_of

SPACE = SearchSpace(2, 8, (0, 1), (0, 1), ())
LENGTH = 16
SILENT = Noise()


def made_table(seed: int = 0, num_texts: int = 14) -> Table:
    """Drafts are right the more often, and surer, the less is skipped."""
    rng = np.random.default_rng(seed)
    masks = masks_of(SPACE)
    luck = rng.random((num_texts, LENGTH, 1))
    agreement = np.array([0.97 - 0.12 * mask.num_skipped for mask in masks])
    accepted = luck < agreement
    accepted[:, -1] = False
    confidence = np.clip(1.1 - luck + 0.1 * rng.random((num_texts, LENGTH, len(masks))), 0, 1)
    return Table(
        SPACE,
        np.stack([encode(accepted, confidence), encode(accepted & (luck < 0.8), confidence)]),
        levels_of(1.0 - 0.9 * luck[:, :, 0] ** 3),
        np.arange(num_texts * 3, dtype=np.uint16).reshape(num_texts, 3),
        rng.integers(0, 50, (num_texts, LENGTH)).astype(np.uint16),
        num_tuning=6,
        num_confirming=4,
        facts={"recipe": "made"},
    )


def decoder_of(table: Table, noise: Noise = SILENT, seed: int = 0, costs: str = "gpu_memory") -> TabularDecoder:
    machine = SimulatedMachine(COSTS[costs].prices("made", table.space.num_layers), noise, np.random.default_rng(seed))
    return TabularDecoder(table, machine)


CONFIGS = [
    DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=draft, target_threshold=target)
    for mask in (SkipMask.from_layers(2, [1]), SkipMask.from_sublayers(2, mlp=[0, 1]))
    for gamma, draft, target in ((1, 0.0, 0.0), (4, 0.0, 0.3), (8, 0.6, 0.0), (5, 0.85, 0.5), (8, 0.0, 0.0))
]


def test_levels_answer_every_threshold_as_the_probability_does() -> None:
    """Binary dust at a threshold decides like the threshold: at it is not below it."""
    probs = np.concatenate([np.random.default_rng(0).random(500), THRESHOLDS, [0.0, 1.0]]).astype(np.float32)
    kept = confidence_of(levels_of(probs))
    for threshold in (0.0, *THRESHOLDS):
        assert ((probs.astype(np.float64) < threshold) == (kept < threshold)).all()


def test_codes_hold_what_a_draft_says() -> None:
    accepted = np.array([[1.0, 0.0]], dtype=np.float32)
    reading = decode(encode(accepted, np.array([[0.99, 0.51]], dtype=np.float32)))
    assert reading.accepted.tolist() == [[1.0, 0.0]]
    assert reading.confidence[0].tolist() == pytest.approx([0.975, 0.575])


def test_masks_are_all_of_them_each_a_bit_from_the_one_before() -> None:
    masks = masks_of(SPACE)
    assert len(set(masks)) == 16
    flags = np.array([[*mask.attention, *mask.mlp] for mask in masks])
    assert (np.abs(np.diff(flags.astype(int), axis=0)).sum(axis=1) == 1).all()


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    table = made_table()
    table.save(tmp_path / "one.npz.xz")
    again = Table.load(tmp_path / "one.npz.xz")
    assert again.space == SPACE
    assert again.facts == table.facts
    assert (again.codes == table.codes).all()
    assert (again.prompts == table.prompts).all()
    assert again.reporting == range(10, 14)
    (tmp_path / "two.npz.xz").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"two\.npz\.xz: not a table"):
        Table.load(tmp_path / "two.npz.xz")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decoding_takes_the_forwards_that_replay_counts(config: DecodeConfig) -> None:
    table = made_table()
    decoder = decoder_of(table)
    for place in range(len(table.prompts)):
        stats = decoder.decode(table.prompts[place].tolist(), config).stats
        rows, reading = table.rows([place]), table.reading(config.skip_mask, [place])
        counts = replay(reading, rows, Settings.of(config)).total()[0]
        assert [stats.num_drafted, stats.num_rounds, stats.num_target_only] == counts.tolist()
        assert stats.num_emitted == 1 + stats.num_accepted + stats.num_rounds + stats.num_target_only - stats.num_cut
        assert sum(stats.round_s_by_drafted) + stats.target_only_s == pytest.approx(stats.decode_s)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("costs", COSTS)
def test_the_value_of_a_config_is_what_its_decoding_takes(config: DecodeConfig, costs: str) -> None:
    table = made_table()
    decoder = decoder_of(table, costs=costs)
    plain = DecodeConfig.plain(2)
    logs = []
    for place in table.reporting:
        ids = table.prompts[place].tolist()
        fast, slow = (decoder.decode(ids, one).stats.decode_s for one in (config, plain))
        logs.append(np.log(slow / fast))
    value = speedup_of(table, decoder.machine.prices, config, table.reporting)
    assert value == pytest.approx(float(np.exp(np.mean(logs))))
    assert speedup_of(table, decoder.machine.prices, plain, table.reporting) == 1.0


def test_the_optimum_is_the_best_of_configs_taken_one_by_one() -> None:
    table = made_table()
    grid = Settings.grid([1, 3, 8], [0.0, 0.7], [0.0, 0.4])
    costs = {name: one.prices("made", 2) for name, one in COSTS.items()}
    found = optima_of(table, costs, table.reporting, grid)
    for name, cost in costs.items():
        every = [
            speedup_of(
                table,
                cost,
                DecodeConfig(
                    skip_mask=mask,
                    gamma=int(grid.gamma[i]),
                    draft_threshold=float(grid.draft_threshold[i]),
                    target_threshold=float(grid.target_threshold[i]),
                ),
                table.reporting,
            )
            for mask in table.masks
            for i in range(len(grid))
        ]
        assert found[name].speedup == pytest.approx(max(every))
        assert speedup_of(table, cost, found[name].config, table.reporting) == pytest.approx(max(every))
        assert found[name].share_faster == pytest.approx(np.mean(np.array(every) > 1))


def test_the_whole_grid_is_all_that_decides_otherwise() -> None:
    table, mask = made_table(), SkipMask.from_layers(2, [1])
    assert len(grid_of(table)) == 8 * 9 * 9
    between = [snap_threshold(i * THRESHOLD_STEP) for i in range(round(THRESHOLD_MAX / THRESHOLD_STEP) + 1)]
    for value in between:
        below = max(one for one in (0.0, *THRESHOLDS) if one <= value)
        steps = Steps.of(table, mask, Settings.grid([5], [value, below], [0.0]), table.reporting)
        assert (steps.counts[0] == steps.counts[1]).all()
        steps = Steps.of(table, mask, Settings.grid([5], [0.3], [value, below]), table.reporting)
        assert (steps.counts[0] == steps.counts[1]).all()


@pytest.mark.parametrize("mask", [SkipMask.from_layers(2, [1]), SkipMask.from_sublayers(2, mlp=[0, 1])], ids=str)
def test_counts_that_runs_share_are_those_of_a_replay(mask: SkipMask) -> None:
    """Of any thresholds, in any order of texts; and settings that do the same cost the same to the last bit."""
    table, places = made_table(), [4, 0, 3]
    settings = Settings.grid([1, 3, 5, 8], [0.0, 0.25, 0.9], [0.0, 0.15, 0.45])
    verify_s = np.linspace(1.0, 2.3, 9)
    expected = replay(table.reading(mask, places, 0), table.rows(places), settings, verify_s)
    found = GridSteps.of(table, mask).replay(settings, places, verify_s)
    for name in ("drafted", "looked_up", "rounds", "target_only"):
        assert (getattr(found, name) == getattr(expected, name)).all()
    assert found.verify_s == pytest.approx(expected.verify_s, rel=1e-12)
    below, at = (Settings.grid([3], [0.2], [one]) for one in (0.0, 0.15))
    both = [GridSteps.of(table, mask).replay(one, places, verify_s).verify_s for one in (below, at)]
    assert (both[0] == both[1]).all()
    halves = [GridSteps.of(table, mask).replay(settings, part, verify_s) for part in ([4], [0, 3])]
    assert (Counts.join(halves).verify_s == found.verify_s).all()
    with pytest.raises(ValueError, match="settings: a table knows drafts under a mask alone"):
        TabularForcing(table, places).replay(mask, replace(settings, siblings=1), verify_s)


def test_a_table_is_the_same_in_another_process() -> None:
    table = made_table()
    again = pickle.loads(pickle.dumps(table))
    assert again == table
    assert hash(again) == hash(table)
    assert GridSteps.of(again, table.masks[1]) is GridSteps.of(table, table.masks[1])
    assert made_table(seed=1) != table
    assert replace(table, facts={}) != table


def test_each_process_has_a_stretch_of_the_jobs() -> None:
    assert in_turns(range(5), 2) == [0, 3, 1, 4, 2]
    assert in_turns(range(3), 1) == [0, 1, 2]
    assert in_turns(range(2), 3) == [0, 1]


def test_rounds_are_told_apart_by_their_drafts() -> None:
    table, mask = made_table(), SkipMask.from_layers(2, [1])
    steps = Steps.of(table, mask, Settings.of(CONFIGS[2]), [0])
    stats = decoder_of(table).decode(table.prompts[0].tolist(), CONFIGS[2]).stats
    assert steps.counts[0, 0].tolist() == [stats.num_target_only, *stats.rounds_by_drafted]


def test_the_decoder_refuses_what_the_table_has_not() -> None:
    table = made_table()
    decoder: Decoder = decoder_of(table)
    with pytest.raises(ValueError, match="prompt: must be one of the table's"):
        decoder.decode([9, 9, 9], CONFIGS[0])
    with pytest.raises(ValueError, match="prompt: must be one of the table's"):
        decoder.teacher_forcing([ForcedText((9, 9), (1, 2))])
    whole = SearchSpace(2, 8, (), (), (0, 1))
    part = Table(whole, table.codes[..., :4], table.target_levels, table.prompts, table.continuations, 6, 4, {})
    with pytest.raises(ValueError, match="must be one of the 4 masks"):
        decoder_of(part).decode(table.prompts[0].tolist(), CONFIGS[5])


def test_noise_is_of_a_pair_and_follows_from_the_seed() -> None:
    table, plain = made_table(), DecodeConfig.plain(2)
    ids = table.prompts[0].tolist()

    def ratios(seed: int) -> list[float]:
        decoder = decoder_of(table, Noise(0.03), seed)
        pairs = [[decoder.decode(ids, plain).stats.decode_s for _ in range(2)] for _ in range(2000)]
        return [np.log(one / other) for one, other in pairs]

    assert np.std(ratios(0)) == pytest.approx(0.03, rel=0.06)
    assert ratios(0)[:5] == ratios(0)[:5] != ratios(1)[:5]


def test_drift_moves_the_price_of_verifying_and_not_that_of_a_step() -> None:
    decoder = decoder_of(made_table(), Noise(drift=0.5), costs="cpu_dear")
    machine = decoder.machine
    before = machine.verify_s(0), machine.verify_s(4)
    machine.pass_time(450.0)
    assert machine.verify_s(0) == before[0]
    assert machine.verify_s(4) - before[0] == pytest.approx(1.5 * (before[1] - before[0]))


def test_the_timer_tells_the_prices() -> None:
    decoder = decoder_of(made_table(), costs="cpu")
    timer, cost, mask = decoder.timer(8), decoder.machine.prices, SkipMask.from_layers(2, [1])
    assert timer.verify_s([1, 2], [1, 9]) == [cost.terms.verify_s[0], cost.terms.verify_s[8]]
    (told,) = timer.draft_s([1, 2], [mask], gamma=4, threshold=True)
    terms = cost.terms.draft_s(mask, threshold=True) / cost.alone_s
    assert terms == pytest.approx(0.067 + 0.5 * (0.428 + 0.410) + 0.041)
    assert told == pytest.approx(cost.draft_s(mask, threshold=True))
    assert told / cost.alone_s != pytest.approx(terms)
    assert told / cost.alone_s == pytest.approx(terms, rel=4 * QUIRK)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_enumerated(name: str) -> None:
    recipe = RECIPES[name]
    assert len(recipe.space.bit_names) == recipe.num_bits <= 8
    assert recipe.settings.recipe.late_last_exit >= recipe.settings.recipe.first_exit


@pytest.mark.parametrize("strategy", ["ours", "random", "layerskip", "raw-tpe", "leave-one-out"])
def test_a_run_follows_from_its_seed(strategy: str) -> None:
    case = Case("made", made_table(), COSTS["gpu_memory"], strategy, seed=0, trials=6, noise=Noise(0.02))
    one, other = run_case(case, [1, 6]), run_case(case, [1, 6])
    assert one.leaders == other.leaders
    assert one.exported == other.exported
    assert one.num_trials == other.num_trials <= 6
    assert one.leaders.keys() == {1, 6}


def score_of(model: str, strategy: str, regret: float) -> Score:
    return Score(model, "cpu", strategy, 0, 1.2, 0.1, {1: regret}, regret, False, False, False, 1)


def test_strategies_are_compared_model_by_model() -> None:
    """A rival that is always one per cent behind is so for certain, however much the models differ."""
    scores = [score_of(m, "ours", r) for m, r in (("a", 0.0), ("b", 5.0), ("c", 1.0))]
    scores += [score_of(m, "random", r) for m, r in (("a", 1.0), ("b", 6.0), ("c", 2.0))]
    found = summarise(scores)
    behind, regret = found["random"]["behind"], found["random"]["regret"]
    assert (behind.mean, behind.low, behind.high) == pytest.approx((1.0, 1.0, 1.0))
    assert regret.mean == pytest.approx(3.0)
    assert regret.low is not None
    assert regret.low < 0.0
    assert found["ours"]["behind"].mean == 0.0
    assert "| random | 3.00" in table_of(found)
    assert "behind" not in summarise(scores[3:])["random"]


def test_the_committed_tables_and_optima_belong_together() -> None:
    """Of every recipe; a table made anew asks for its optima anew."""
    tables = load_tables(READINGS, None)
    assert tables.keys() == RECIPES.keys()
    stored = json.loads((READINGS / FILE).read_text(encoding="utf-8"))
    for name, table in tables.items():
        recipe = RECIPES[name]
        assert (table.space, table.depth) == (recipe.space, recipe.depth)
        assert (table.num_tuning, len(table.reporting)) == (NUM_TUNING, NUM_REPORTING)
        assert stored[name]["fingerprint"] == fingerprint_of(table)
        for costs, best in stored[name]["optima"].items():
            mask = SkipMask.parse(best["skip_mask"])
            fields = {key: best[key] for key in ("gamma", "draft_threshold", "target_threshold")}
            prices = COSTS[costs].prices(name, table.space.num_layers)
            value = speedup_of(table, prices, DecodeConfig(skip_mask=mask, **fields), table.reporting)
            assert value == pytest.approx(best["speedup"], abs=1e-5)


def test_the_benchmark_runs_on_a_committed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.json"
    flags = ["--models", "l6_distilled_python", "--costs", "gpu_memory", "--strategies", "ours", "layerskip+settings"]
    command = [*flags, "--seeds", "1", "--trials", "5", "--processes", "1", "--out", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "| ours |" in shown
    assert "The best config by all tuning texts" in shown
    told = json.loads(out.read_text(encoding="utf-8"))
    ours, rival = read_lines(tmp_path / "runs.runs.jsonl.xz")
    assert ours["optimum"] == rival["optimum"] > 1.3
    assert 0.0 <= ours["regret"] < 10.0
    # Stopped after the first run, which is then not made again; the lines of another command count for nothing.
    journal, kept = tmp_path / "runs.runs.jsonl", ours | {"regret": 12.5}
    assert not journal.exists()
    for made_by, regret in ((told["command"], 12.5), ("another", ours["regret"])):
        lines = ({"command": made_by, "commit": told["commit"]}, kept)
        journal.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
        assert main(command) == 0
        again = read_lines(tmp_path / "runs.runs.jsonl.xz")
        assert [one["regret"] for one in again] == [regret, rival["regret"]]
        assert again[0]["regrets"] == ours["regrets"]
    assert main(["--models", "l6_unknown"]) == 2
    assert "--models: must be among l12_layerskip_python" in capsys.readouterr().err
    assert main(["--noise", "300"]) == 2
    assert "--noise: must be from 0 to below 100 per cent, got 300" in capsys.readouterr().err


def test_optima_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"optima\.json: not optima in JSON"):
        known_optima(tmp_path, {"made": made_table()})


def test_parts_are_left_out_and_constants_changed_together_and_come_back() -> None:
    parents, prior = replay_proposer._NUM_PARENTS, leaderboard._INTERACTION_PRIOR
    with left_out("no_repeats+double_num_parents+half_interaction_prior"):
        assert 2 * parents == replay_proposer._NUM_PARENTS
        assert prior / 2 == leaderboard._INTERACTION_PRIOR
        assert proposals.not_taken((), ()) == []
    assert (parents, prior) == (replay_proposer._NUM_PARENTS, leaderboard._INTERACTION_PRIOR)
    with pytest.raises(KeyError):
        left_out("half_of_nothing").__enter__()
    for name, module in CONSTANTS.items():
        assert isinstance(getattr(module, name), int | float), f"{name} is no constant of {module.__name__} any more"
