"""Decoder: all that the search needs of a model, so that a fake with a fake clock can stand in for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from layerskip.analysis.distance import Emitted, measure_distance
from layerskip.analysis.identity import IdentityReport, check_identity
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, TreeReadings, WrongDraft
from layerskip.config.decode_config import DecodeConfig, DraftedBy, DraftWeights
from layerskip.config.lossy_acceptance import Distance
from layerskip.config.sampling_regime import Sampling
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.decoding.stats import DecodeStats
from layerskip.machine.host import keep_to_cpu_limit, return_large_blocks, trim_heap
from layerskip.rounds.sampling import SamplingParams, seeded_sampler
from search.study.spec import StudySpec

_PLACES_AT_ONCE = 64
"""Of a text whose logits are looked at."""
_REMEMBERED_BYTES = 1 << 26
"""Of keys and values: one prompt's, or as much of its beginning as there is room for."""


@dataclass(frozen=True)
class Decoded:
    """One continuation: new token ids only, with synchronised timings."""

    ids: tuple[int, ...]
    stats: DecodeStats


class Watch(Protocol):
    """See `layerskip.machine.watch`."""

    def record(self) -> dict[str, Any]:
        """The machine's state then and now, and what lay between, as plain values."""


class Timer(Protocol):
    """Times single steps after a text; see `layerskip.analysis.step_times.StepTimer`."""

    def verify_s(self, text_ids: Sequence[int], counts: Sequence[int]) -> list[float]: ...

    def draft_s(
        self, text_ids: Sequence[int], drafted_by: Sequence[DraftedBy], *, gamma: int, threshold: bool
    ) -> list[float]: ...


class Forcing(Protocol):
    """Readings of any draft on fixed texts; see `layerskip.analysis.teacher_forcing.TeacherForcing`."""

    keys: str
    texts: tuple[ForcedText, ...]

    def read(self, drafted_by: DraftedBy, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings: ...

    def read_trees(self, weights: DraftWeights, depth: int, texts: Sequence[int] | None = None) -> TreeReadings: ...

    def overrun(self, drafted_by: DraftedBy, wrong: Sequence[WrongDraft], threshold: float) -> list[int]: ...


class TextForcing(Forcing, Protocol):
    """Readings of drafts, and of the target on the same texts."""

    lengths: NDArray[Any]
    target_probs: NDArray[Any]


class Decoder(Protocol):
    """Decoding of one model on one device, greedy or sampled.

    A sampled continuation is drawn from a seed, and is the same one under every config: so it is as much the target's
    one and only as a greedy one, which takes no notice of the seed.
    """

    @property
    def devices(self) -> tuple[Any, ...]:
        """Where it computes: one torch.device or more, or None alone for one that does not compute."""

    def with_sampling(self, sampling: Sampling) -> Decoder:
        """The same model's decoder for another way to choose tokens."""

    def with_new_tokens(self, most: int) -> Decoder:
        """The same, with at most so many new tokens a prompt."""

    def remembering(self) -> Decoder:
        """The same, but that of a prompt which begins like one just decoded the rest alone is computed: for several
        configs in turn, where what follows the prompt is timed alone."""

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        """Continue one prompt under `config`."""

    @property
    def batch_refusal(self) -> str | None:
        """What `batch_rate` needs that is not there; None where it may be asked."""

    def batch_rate(self, prompts: Sequence[Sequence[int]], config: DecodeConfig, size: int) -> float:
        """Tokens a second of all prompts, so many decoded at once, of which each drafts."""

    def check(
        self, prompt_ids: Sequence[int], ids: Sequence[int], reference_ids: Sequence[int], seed: int = 0
    ) -> IdentityReport:
        """Compare an output with the reference. Cost: none if equal, else about one target forward."""

    def distance(self, outputs: Sequence[Emitted]) -> Distance:
        """How far lossy outputs lie from the target's own. Cost: two forwards over each."""

    def free_memory(self) -> None:
        """Give back what runs have left behind."""

    def watch_machine(self) -> Watch:
        """Look at the machine's state now, to record it with what is measured from here on."""

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> TextForcing:
        """What drafts would say at every position of these texts. Cost: about a target forward over each."""

    def timer(self, gamma_max: int) -> Timer:
        """Times single steps."""

    def token_shares(self, texts: Sequence[Sequence[int]]) -> NDArray[Any]:
        """(V,): how likely the target holds each token id at the places of these texts, in sum. Cost: a target forward
        over each text, with the logits of every place."""

    def know_draft_ids(self, sets: Mapping[str, str]) -> None:
        """Packed sets of token ids that configs name; see `layerskip.config.draft_ids`."""


class ModelDecoder:
    """A LayerSkipModel as a Decoder, which says what its methods do."""

    def __init__(
        self,
        model: Any,
        max_new_tokens: int,
        params: SamplingParams | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """params: how tokens are chosen, greedily without them."""
        self.model = model
        self.max_new_tokens = max_new_tokens
        self._params = params or SamplingParams()
        self._prefix_cache = prefix_cache

    @property
    def is_sampled(self) -> bool:
        """Whether another seed gives another text."""
        return self._params.do_sample

    def with_sampling(self, sampling: Sampling) -> ModelDecoder:
        return ModelDecoder(self.model, self.max_new_tokens, sampling.params())

    def with_new_tokens(self, most: int) -> ModelDecoder:
        return ModelDecoder(self.model, most, self._params)

    def remembering(self) -> ModelDecoder:
        return ModelDecoder(self.model, self.max_new_tokens, self._params, PrefixCache(_REMEMBERED_BYTES))

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        out = self.model.generate(prompt_ids, config=config, **self._arguments(seed))
        return Decoded(tuple(out.ids), out.stats)

    @property
    def batch_refusal(self) -> str | None:
        refusal: str | None = self.model.batch_refusal
        return refusal

    def batch_rate(self, prompts: Sequence[Sequence[int]], config: DecodeConfig, size: int) -> float:
        at_once = {"max_batch_size": size, "max_drafting": size}
        start = time.perf_counter()
        outputs = self.model.generate_batch(prompts, config=config, **at_once, **self._arguments(0))
        self.model.engine.synchronize()
        return sum(len(one.ids) for one in outputs) / (time.perf_counter() - start)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The model's."""
        devices: tuple[Any, ...] = self.model.placement.devices
        return devices

    def _arguments(self, seed: int) -> dict[str, Any]:
        """Whatever the model's own generation_config says."""
        seeded = {"seed": seed} if self._params.do_sample else {}
        remembered = {} if self._prefix_cache is None else {"prefix_cache": self._prefix_cache}
        return {"max_new_tokens": self.max_new_tokens, **asdict(self._params), **seeded, **remembered}

    def check(
        self, prompt_ids: Sequence[int], ids: Sequence[int], reference_ids: Sequence[int], seed: int = 0
    ) -> IdentityReport:
        sampler = seeded_sampler(self._params, seed, self.model.device)
        return check_identity(self.model, prompt_ids, ids, reference_ids, sampler)

    def distance(self, outputs: Sequence[Emitted]) -> Distance:
        return measure_distance(self.model, outputs, self._params)

    def teacher_forcing(self, texts: Sequence[ForcedText]) -> TextForcing:
        from layerskip.analysis.teacher_forcing import make_teacher_forcing

        return make_teacher_forcing(self.model, texts, self._params)

    def timer(self, gamma_max: int) -> Timer:
        from layerskip.analysis.step_times import StepTimer

        return StepTimer(self.model, gamma_max, self._params)

    def token_shares(self, texts: Sequence[Sequence[int]]) -> NDArray[Any]:
        import torch

        engine, total = self.model.engine, 0.0
        for ids in texts:
            with engine.session(len(ids)), torch.inference_mode():
                for start in range(0, len(ids), _PLACES_AT_ONCE):
                    piece = torch.tensor(ids[start : start + _PLACES_AT_ONCE], device=self.model.device)
                    logits = engine.forward(piece, num_logits=len(piece)).float()
                    total = total + logits.softmax(dim=-1).sum(dim=0)
        shares: NDArray[Any] = torch.as_tensor(total).cpu().numpy()
        return shares

    def know_draft_ids(self, sets: Mapping[str, str]) -> None:
        self.model.adapter.know_draft_ids(sets)

    def watch_machine(self) -> Watch:
        from layerskip.machine.watch import MachineWatch

        return MachineWatch(self.model)

    def free_memory(self) -> None:
        """Collect garbage, and give back what the device's allocator and the C heap keep free."""
        gc.collect()
        trim_heap()
        if self.model.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()


def load_model(spec: StudySpec) -> Any:
    """The spec's model on its device. Raises: ValueError or OSError in one line for whatever cannot be loaded."""
    import torch

    return_large_blocks()
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    else:
        keep_to_cpu_limit()
    from layerskip import LayerSkipModel

    return LayerSkipModel.from_pretrained(
        spec.model,
        device=spec.device,
        device_map=spec.device_map,
        dtype=spec.dtype,
        quantization=spec.quantization,
        engine=spec.engine,
        trust_remote_code=spec.trust_remote_code,
        revision=spec.revision,
        allow_lossy=spec.allow_lossy,
        looks_for_config=False,  # an old one, of other weights, must not keep a model from being searched
    )
