"""`python -m search.export`: the draft as a checkpoint of its own that other engines take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3MoeConfig

from layerskip import DecodeConfig, LayerSkipModel, Provenance, SkipMask
from layerskip.huggingface.adapter import UnsupportedModelError
from layerskip.huggingface.loading import weights_fingerprint
from layerskip.interop.draft_checkpoint import write_draft_checkpoint
from search import export
from search.draft_model import nearest_whole_layers
from tests.layerskip import zoo
from tests.search.helpers.fakes import FINGERPRINT, Bench

DEMO = Path(__file__).parents[2] / "studies" / "demo"
ASSISTANT: dict[str, Any] = {
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
ASSISTED = ("llama", "qwen2-sliding", "gemma3", "gpt2", "opt", "falcon-new", "bloom", "mixtral", "gpt-oss")


def sparse_every_second() -> Any:
    """Experts in layers 1 and 3, a plain MLP in 0 and 2."""
    torch.manual_seed(0)
    arguments = zoo.spec_of("qwen3-moe").arguments | {"decoder_sparse_step": 2}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**arguments)).eval()


def whole(*skipped: int) -> SkipMask:
    return SkipMask.from_layers(zoo.NUM_LAYERS, skipped)


def own_logits(name: str, mask: SkipMask, ids: torch.Tensor) -> torch.Tensor:
    """The masked model over a text from scratch: the draft's own keys and values throughout."""
    adapter = zoo.layerskip_of(name).adapter
    with torch.inference_mode(), adapter.attached():
        return adapter.forward(ids, adapter.new_cache(len(ids)), mask, num_logits=len(ids)).clone()


@zoo.few()
def test_the_draft_says_what_the_masked_model_says(name: str, tmp_path: Path) -> None:
    ids = torch.tensor(zoo.prompt_of(20))
    mask = whole(0, 3)  # the first layer and the last; what is left is of mixed kinds where the whole is
    if name in zoo.SHARING:
        with pytest.raises(UnsupportedModelError, match="layers that read others' keys cannot be cut"):
            write_draft_checkpoint(zoo.layerskip_of(name), mask, tmp_path / "draft", ASSISTANT)
        assert not (tmp_path / "draft").exists()
        return
    difference, tolerance = write_draft_checkpoint(zoo.layerskip_of(name), mask, tmp_path / "draft", ASSISTANT)
    assert difference <= tolerance
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert type(draft) is type(zoo.model_of(name))
    assert draft.config.num_hidden_layers == 2
    with torch.no_grad():
        logits = draft(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, own_logits(name, mask, ids))
    assert not torch.allclose(logits, own_logits(name, SkipMask.none(zoo.NUM_LAYERS), ids)), "a mask to see"


@zoo.each(ASSISTED)
def test_assisted_generation_with_it_is_plain_greedy(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if Version(transformers.__version__) < Version("5.18") and any(zoo.layerskip_of(name).adapter.windows):
        reason = "before 5.18, Transformers' assisted generation makes masks too long for a sliding window"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=RuntimeError))
    write_draft_checkpoint(zoo.layerskip_of(name), whole(3), tmp_path / "draft", ASSISTANT)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert {key: getattr(draft.generation_config, key) for key in ASSISTANT} == ASSISTANT
    prompt = zoo.prompt_of(7)
    out = zoo.model_of(name).generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, assistant_model=draft)
    assert tuple(out[0, len(prompt) :].tolist()) == zoo.greedy_reference(name, prompt, 16)


def test_drafting_stops_at_gamma_and_at_the_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings act without a word from the user: Transformers reads them from the draft's generation config."""
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    lengths: list[int] = []
    get = AssistedCandidateGenerator.get_candidates

    def counted(self: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
        ids, logits = get(self, input_ids, **arguments)
        lengths.append(ids.shape[1] - input_ids.shape[1])
        return ids, logits

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", counted)
    for number, threshold in enumerate((0.0, 0.999)):
        settings = ASSISTANT | {"assistant_confidence_threshold": threshold}
        write_draft_checkpoint(zoo.layerskip_of("llama"), whole(3), tmp_path / str(number), settings)
        draft = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        lengths.clear()
        zoo.model_of("llama").generate(
            torch.tensor([zoo.prompt_of(7)]), max_new_tokens=16, do_sample=False, assistant_model=draft
        )
        # The last rounds may be shorter: the end of the text is near.
        assert set(lengths[:2]) == ({3} if threshold == 0.0 else {1})


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = zoo.build("llama", tie_word_embeddings=True)
    write_draft_checkpoint(LayerSkipModel(model, engine="eager"), whole(1), tmp_path / "draft", ASSISTANT)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.lm_head.weight is draft.model.embed_tokens.weight
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight)
    size = sum(file.stat().st_size for file in (tmp_path / "draft").glob("*.safetensors"))
    assert size < 4 * (sum(p.numel() for p in draft.parameters()) + 1000), "the shared matrix is stored once"


def test_experts_in_some_layers_only(tmp_path: Path) -> None:
    model = LayerSkipModel(sparse_every_second(), engine="eager")
    difference, _ = write_draft_checkpoint(model, whole(0, 3), tmp_path / "draft", ASSISTANT)
    assert difference == 0.0


def test_layers_that_depend_on_their_index_are_refused(tmp_path: Path) -> None:
    model = LayerSkipModel(zoo.build("gpt2", scale_attn_by_inverse_layer_idx=True), engine="eager")
    with pytest.raises(UnsupportedModelError, match="its layers depend on their index"):
        write_draft_checkpoint(model, whole(0), tmp_path / "draft", ASSISTANT)
    assert not list(tmp_path.iterdir())


def test_a_generation_config_that_cannot_be_saved_is_replaced(tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.5, eos_token_id=7)
    write_draft_checkpoint(LayerSkipModel(model, engine="eager"), whole(1), tmp_path / "draft", ASSISTANT)
    written = json.loads((tmp_path / "draft" / "generation_config.json").read_text())
    assert written["eos_token_id"] == 7
    assert written["num_assistant_tokens"] == 3


@pytest.mark.parametrize(
    ("text", "nearest"), [("12:3,5-11,m1,m4", "12:3,5-11"), ("4:a0-3", "4:none"), ("4:1,2", "4:1-2")]
)
def test_the_nearest_mask_keeps_a_layer_of_which_half_is_kept(text: str, nearest: str) -> None:
    assert str(nearest_whole_layers(SkipMask.parse(text))) == nearest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the tiny model in bfloat16, as `./model`."""
    folder = tmp_path_factory.mktemp("export")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / "model")
    return folder


def save_config(folder: Path, mask: str, **fields: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    provenance = Provenance(
        model="./model", weights_fingerprint=weights_fingerprint(model), device="cpu", dtype="float32", num_layers=4
    )
    values: dict[str, Any] = {"gamma": 5, "draft_threshold": 0.25, "target_threshold": 0.1} | fields
    DecodeConfig(skip_mask=SkipMask.parse(mask), provenance=provenance, **values).save(folder / "best.json")
    return folder / "best.json"


def test_the_command_writes_checkpoint_settings_and_readme(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "draft"
    config = save_config(saved, "4:1-2")
    assert export.main(["--config", str(config), "--draft-model", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"written {folder}: layers 0,3 (2 of 4)" in out
    draft = AutoModelForCausalLM.from_pretrained(folder)
    assert draft.dtype == torch.bfloat16
    assert draft.generation_config.num_assistant_tokens == 5
    assert draft.generation_config.assistant_confidence_threshold == 0.25
    assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [3, 4]
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["mask_was_measured"] is True
    assert settings["kept_layers"] == [0, 3]
    assert settings["vllm"]["speculative_config"] == {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 5,
    }
    assert (settings["sglang"]["speculative_num_steps"], settings["sglang"]["speculative_num_draft_tokens"]) == (5, 6)
    assert settings["llama_cpp"]["spec_draft_n_max"] == 5
    text = (folder / "README.md").read_text()
    commands = ("--speculative-config '{", "--speculative-algorithm STANDALONE", "--spec-draft-n-max 5", "0.25")
    for part in (*commands, str(saved / "model"), "`target_threshold` of 0.1"):
        assert part in text
    assert "Not measured" not in text


def test_of_a_config_with_regimes_the_defaults_mask_is_written(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"skip_mask": "4:a0", "gamma": 2, "sampling": {"do_sample": True}}
    config = save_config(saved, "4:1-2", sampling={"do_sample": False}, regimes=[other])
    assert export.main(["--config", str(config), "--draft-model", str(tmp_path / "draft")]) == 0
    assert "layers 0,3 (2 of 4)" in capsys.readouterr().out
    assert json.loads((tmp_path / "draft" / "settings.json").read_text())["gamma"] == 5


def test_lone_sublayers_are_refused_or_exported_with_a_warning(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Any
) -> None:
    config = save_config(saved, "4:1,a0,m2")
    flags = ["--config", str(config), "--draft-model", str(tmp_path / "draft")]
    error = refused(export.main, flags)
    assert "skips the attention of layer 0, the MLP of layer 2 alone" in error
    assert not list(tmp_path.iterdir())
    assert export.main([*flags, "--nearest"]) == 0
    out, err = capsys.readouterr()
    assert "exported the nearest mask of whole layers, 4:1 (a layer is left out only if" in err
    assert "It was not measured" in err
    assert "layers 0,2-3 (3 of 4)" in out
    settings = json.loads((tmp_path / "draft" / "settings.json").read_text())
    assert settings["mask_was_measured"] is False
    assert settings["tuned_skip_mask"] == "4:1,a0,m2"
    assert "**Not measured.**" in (tmp_path / "draft" / "README.md").read_text()


@pytest.mark.parametrize("mask", ["4:1,int8", "4:1,int4", "4:1,v3"])
def test_a_draft_model_has_whole_weights_and_says_that_it_was_not_measured(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mask: str
) -> None:
    config, draft = save_config(saved, mask), tmp_path / "draft"
    assert export.main(["--config", str(config), "--draft-model", str(draft)]) == 0
    assert f"{mask} has no draft model; exported" in capsys.readouterr().err
    settings = json.loads((draft / "settings.json").read_text())
    assert (settings["mask_was_measured"], settings["tuned_skip_mask"]) == (False, mask)
    assert AutoModelForCausalLM.from_pretrained(draft).config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("mask", "fields", "flags", "said"),
    [
        ("4:none", {"gamma": 0, "reason": "nothing wins"}, [], "this config says not to speculate (nothing wins)"),
        (
            "4:none",
            {"drafter": "suffix", "draft_threshold": 0.0, "lookup": {"method": "suffix", "min_match": 2}},
            [],
            "drafter: must draft under a mask to have a draft model, got suffix",
        ),
        ("4:a1", {}, ["--nearest"], "keeps some layers and leaves some out, got 4:none"),
        ("4:0-3", {}, [], "keeps some layers and leaves some out, got 4:0-3"),
        ("4:1", {}, ["--group", "x"], "this config has no groups, got 'x'"),
        ("4:1", {}, ["--model", "{tmp}/none"], "model: cannot load {tmp}/none"),
        ("4:1", {}, ["--draft-model", "{saved}"], "draft-model folder: must be new or empty, got {saved}"),
        ("4:1", {}, ["--config", "{tmp}/none.json"], "--config: no such file: {tmp}/none.json"),
    ],
)
def test_bad_input_is_one_line(
    saved: Path,
    tmp_path: Path,
    refused: Any,
    mask: str,
    fields: dict[str, Any],
    flags: list[str],
    said: str,
) -> None:
    config = save_config(saved, mask, **fields)
    changed = [flag.format(tmp=tmp_path, saved=saved) for flag in flags]
    error = refused(export.main, ["--config", str(config), "--draft-model", str(tmp_path / "draft"), *changed])
    assert said.format(tmp=tmp_path, saved=saved) in error
    assert not list(tmp_path.iterdir())


def test_a_config_of_other_weights_is_refused(
    saved: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = save_config(saved, "4:1")
    other = zoo.build("llama", seed=9)
    other.save_pretrained(tmp_path / "other")
    flags = ["--config", str(config), "--draft-model", str(tmp_path / "draft"), "--model", str(tmp_path / "other")]
    assert export.main(flags) == 2
    assert "provenance.weights_fingerprint: the config was made for ./model" in capsys.readouterr().err


def finished(bench: Bench, **spec: Any) -> DecodeConfig:
    bench.in_sqlite = True
    bench.run(trials=6, sampler="tpe", **spec)
    (bench.folder / "study.toml").write_text('model = "x"\nprompts = "p.jsonl"\n')
    return DecodeConfig.load(bench.paths.best)


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_a_studys_config_is_written_again(bench: Bench, capsys: pytest.CaptureFixture[str], gain: float) -> None:
    bench.decoder.gain = gain
    best = finished(bench)
    assert best.speculates == bool(gain)
    file = bench.folder / "again.json"
    assert export.main([str(bench.folder), "--config-out", str(file)]) == 0
    assert f"written {file}: {'speculate' if gain else 'do not speculate'}, mask {best.skip_mask}" in (
        capsys.readouterr().out
    )
    again = DecodeConfig.load(file)
    assert again.provenance is not None
    assert best.provenance is not None
    assert again.model_copy(update={"provenance": best.provenance}) == best
    # The fakes' model is named apart from their spec, so it differs.
    unlike = {"trial", "searched_tokens_per_s", "commit", "created_at", "model"}
    assert best.provenance.attention_backend == FINGERPRINT.attention_backend
    kept = best.provenance.model_dump(exclude=unlike)
    assert again.provenance.model_dump(exclude=unlike) == kept
    assert again.provenance.model == "fake"


def test_a_study_without_a_verdict_and_half_a_command_are_told(
    bench: Bench, capsys: pytest.CaptureFixture[str], refused: Any
) -> None:
    bench.decoder.break_on = lambda config: RuntimeError("driver gone") if config.skip_mask.num_skipped else None
    bench.in_sqlite = True
    assert bench.run(trials=9, sampler="tpe", max_failures=2, repeat_every=0) == 1
    (bench.folder / "study.toml").write_text('model = "x"\nprompts = "p.jsonl"\n')
    file = str(bench.folder / "again.json")
    usage = "give --config FILE and --draft-model DIR, or STUDY and --config-out FILE or --archive FILE"
    cases = [
        ([str(bench.folder), "--config-out", file], "has no verdict yet"),
        ([str(bench.folder), "--config-out", f"{bench.folder}/none/x.json"], "--config-out: no such folder"),
        ([str(bench.folder), "--config-out", file, "--nearest"], "--nearest: goes with --draft-model alone"),
        ([str(bench.folder / "none"), "--config-out", file], "none"),
        ([str(bench.folder)], usage),
        (["--config", "x.json"], usage),
        ([str(bench.folder), "--config-out", file, "--config", "x.json", "--draft-model", "d"], usage),
    ]
    for flags, said in cases:
        capsys.readouterr()
        error = refused(export.main, flags)
        assert said in error
    assert not Path(file).exists()


def test_a_model_that_was_made_in_inference_mode_is_written_too(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = LayerSkipModel(zoo.build("llama"), engine="eager")
    difference, tolerance = write_draft_checkpoint(model, whole(3), tmp_path / "draft", ASSISTANT)
    assert difference <= tolerance
