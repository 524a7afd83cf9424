"""The log is an index: what it names exists, and its table of outputs says what these say of themselves."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOG = (ROOT / "studies" / "LOG.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MADE_HERE = (ROOT / "studies" / "README.md").read_text(encoding="utf-8")
PROVING = (ROOT / "studies" / "proving" / "README.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "layerskip" / "README.md").read_text(encoding="utf-8")
OUTPUTS = re.findall(r"^\| `(studies/\S+)` \| (.+?) \| (.+?) \|$", LOG, re.MULTILINE)


def facts_in(path: str) -> dict[str, str]:
    """What an output says of the command and the commit that made it."""
    record = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return {name: record.get(name) or record.get("facts", {}).get(name) for name in ("command", "commit")}


def test_it_is_short_and_names_nothing_that_is_not_there() -> None:
    assert len(LOG.splitlines()) <= 250
    here = re.sub(r"`[^`]*`(?:, `[^`]*`)* at commit [0-9a-f]{7}", "", LOG)  # what went lies where it says
    named = set(re.findall(r"studies/[\w./-]+\.(?:jsonl\.xz|json|md)\b", here))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
    modules = set(re.findall(r"python -m ([\w.]+)", here))
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize(("path", "command", "commit"), OUTPUTS)
def test_outputs_are_of_the_command_and_the_commit_that_the_log_says(path: str, command: str, commit: str) -> None:
    facts = facts_in(path)
    if commit == "not kept":
        assert facts["commit"] is None
        return
    assert facts["commit"] is not None
    short, _, changes = commit.partition(", ")
    assert facts["commit"].startswith(short)
    assert facts["commit"].endswith("+changes") == (changes == "changes")
    if facts["command"] is not None and command.startswith("`"):
        assert facts["command"] == command.strip("`")


SEARCHES = [path for path, _, _ in OUTPUTS if path.endswith("/summary.json")]


def test_summaries_of_second_regimes_are_of_the_same_run() -> None:
    found = [(ROOT / path, one) for path in SEARCHES for one in (ROOT / path).parent.glob("*/summary.json")]
    seconds = [(first, one) for first, one in found if str(one.relative_to(ROOT)) not in SEARCHES]
    assert len(seconds) > 10
    for first, one in seconds:
        own, other = (facts_in(str(path.relative_to(ROOT))) for path in (one, first))
        assert own["command"] == other["command"], one
        assert own["commit"].removesuffix("+changes") == other["commit"].removesuffix("+changes"), one


def test_every_finding_names_where_it_stands() -> None:
    """Its own file or command, or `The same`, for the finding before it; what has no output yet has no figure."""
    findings = re.findall(r"^- (.+(?:\n  .+)*)", LOG, re.MULTILINE)
    assert len(findings) > 40
    without = [one for one in findings if not re.search(r"`[^`]*(?:studies/|python -m)|[Tt]he same", one)]
    assert len(without) == 1
    assert without[0].startswith("Tried without a kept output")
    assert not re.search(r"\d", without[0])


def test_the_readmes_table_of_regimes_is_that_of_the_output() -> None:
    from studies.regimes import table

    record = json.loads((ROOT / "studies" / "demo" / "regimes.json").read_text(encoding="utf-8"))
    assert table(record) in MADE_HERE


SEARCHED = (
    "smollm2",
    "smollm2/t0.7",
    "smollm2/bfloat16",
    "smollm2/bfloat16/t0.7_p0.8_k20_pres1.5",
    "smollm2/trained",
    "spec_bench/smollm2",
    "spec_bench/smollm2/t0.7",
    "smollm2/int8",
    "smollm2/int8/t0.7",
    "qwen_coder",
    "qwen_coder/t0.7",
    "qwen_coder/published",
    "spec_bench/qwen_coder",
    "qwen_coder/int8",
    "qwen_coder/int8/t0.7",
    "qwen_coder/int4",
    "qwen_coder/int4/t0.7",
    "gemma3",
    "gemma3/t0.7",
    "demo",
    "demo/t0.7",
    "mtp",
    "mtp/t0.7",
    "hybrid",
    "hybrid/t0.7",
    "experts",
    "experts/t0.7",
    "stock_weights",
    "stock_weights/t0.7",
)


def test_the_readmes_tables_of_what_was_found_are_those_of_the_searches() -> None:
    row = r"^\| .* \| \*\*(.+?)\*\* \((.+?)\.\.(.+?)\) \| (.+?) \| (.+?) \| (.+?) \| .+ \|$"
    rows = [found for text in (README, MADE_HERE) for found in re.findall(row, text, re.MULTILINE)]
    for row, study in zip(rows, SEARCHED, strict=True):
        summary = json.loads((ROOT / "studies" / study / "summary.json").read_text(encoding="utf-8"))
        confirmed, best = summary["confirmed"], summary["by_drafter"]
        weights = summary["config"]["draft_weights"]
        chosen = summary["config"]["drafter"]
        if chosen == "hybrid" and weights is not None:
            chosen = f"hybrid_{weights['drafter']}"
        numbers = [confirmed[name] for name in ("speedup", "speedup_ci_low", "speedup_ci_high")]
        numbers += [best[chosen], best["layer_skip"], best["prompt_lookup"]]
        assert row == tuple(f"{one:.2f}" for one in numbers), study


def test_spec_benchs_tables_are_those_of_the_output() -> None:
    from studies.regimes import by_group, table

    folder = ROOT / "studies" / "spec_bench"
    record = json.loads((folder / "smollm2" / "regimes.json").read_text(encoding="utf-8"))
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert all(by_group(one) in text for one in record["regimes"])
    assert table(json.loads((folder / "smollm2" / "long.json").read_text(encoding="utf-8"))) in text


def test_the_readmes_row_of_searches_is_that_of_the_output() -> None:
    means = json.loads((ROOT / "studies" / "proving" / "rivals.json").read_text(encoding="utf-8"))["means"]
    names = ("ours", "leave-one-out+settings", "layerskip+settings", "layerskip", "draft-verify", "random+settings")
    cells = [means[name]["regret"] for name in names]
    assert f"| {' | '.join('{mean:.2f} ({low:.2f}..{high:.2f})'.format(**one) for one in cells)} |" in README
    assert all(one["regret"]["mean"] >= means["ours"]["regret"]["mean"] for one in means.values())


def test_the_table_of_searches_is_that_of_the_output() -> None:
    """Every strategy that was run has its row, losing ones too."""
    means = json.loads((ROOT / "studies" / "proving" / "rivals.json").read_text(encoding="utf-8"))["means"]
    for name, columns in means.items():
        shown = ("regret_1", "regret_25", "regret", *(("behind",) if name != "ours" else ()))
        cells = [f"{columns[one]['mean']:.2f} ({columns[one]['low']:.2f}..{columns[one]['high']:.2f})" for one in shown]
        assert f"| {' | '.join(cells)} |" in PROVING.replace("**", ""), name


def test_the_rows_of_the_engine_are_those_of_the_output() -> None:
    record = json.loads((ROOT / "studies" / "engine" / "bench_demo.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in record["rows"] if row["tokens_per_s"] is not None}
    assert rows.keys() >= {"hf_generate", "hf_prompt_lookup", "plain", "prompt_lookup", "suffix", "speculative"}
    for row in rows.values():
        assert f" {row['tokens_per_s']:.1f} ({row['ci_low']:.1f}..{row['ci_high']:.1f}) |" in ENGINE
        for ratio in (row["vs_hf_generate"], row["vs_plain"]):
            if ratio is not None:
                assert f" {ratio['ratio']:.2f} ({ratio['ci_low']:.2f}..{ratio['ci_high']:.2f}) |" in ENGINE
