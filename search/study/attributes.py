"""Attributes: every name under which studies and their trials keep something in the storage.

Workers on unlike devices may share a study. What is measured or predicted on a device before the trials is then kept
once per device, see `search.workers.device`; all else is shared. Each name of a study is in one of two sets at the end,
and a view of a device takes no other name: none can be forgotten here and read from another device by mistake. The
other names are those of trials: each is measured by one worker, so nobody shares them.
"""

from __future__ import annotations

# Of a study: measured and predicted before its trials, on one device.
REFERENCE = "reference"
"""See `Reference.to_json`."""
PLAIN_TOKENS_PER_S, NOISE_SIGMA = "plain_tokens_per_s", "noise_sigma"
"""The reference's, for whoever reads no more; the first one also of a trial of a study that maximises the speedup."""
COSTS, SENSITIVITY, POOL = "cost_model", "sensitivity", "pool"
"""JSON: every measurement of the costs; what each sublayer is worth; the configs predicted before the first trial."""
READINGS, TEXTS, MORE = "readings_per_proposal", "num_texts_read", "more_texts"
"""How many readings a proposal has, on how many first texts, and the texts beyond these."""
LOOKUPS = "hybrid_lookups"
"""JSON: the lookups that masks are combined with."""
DRAFT_IDS = "draft_ids"
"""JSON: the packed sets of token ids that drafts under a mask choose among, by name; see `likeliest_sets`."""
GAMMA_LOWERED = "gamma_max_lowered"
"""In words: the texts had no room for the largest gamma."""

# Of a study: how it was begun.
FINGERPRINT, ENVIRONMENT = "fingerprint", "environment"
"""What it was measured on: what must agree on a resume, and what need not."""
SPEC, COMMAND, CREATED_AT = "spec", "command", "created_at"
FIRST_PLAN = "first_plan"
"""From its first run: what was asked for and what the budget allowed, see `Plan.to_json`. Its new tokens are those of
all later runs."""

# Of a study: how it went and what came of it.
CANNOT_WIN = "cannot_win"
"""Why the search was cut short."""
ROUNDING = "rounding"
"""`largest`, `tolerance` and `num_positions`, see `RoundingSpread`. A study in float32, or of
which every output was identical, has none."""
BUDGET = "budget"
"""What a run's plan was, also in summary.json: see `search.budget.plan.recorded`."""
VERDICT, REASON, CONFIRMED, CONFIG = "verdict", "reason", "confirmed", "config"
"""As in summary.json."""
CONFIRMED_ON = "confirmed_on"
"""Fields of the fingerprint that may differ between workers, of the one whose verdict this is."""
CANDIDATES, HELD_OUT = "candidates", "held_out"
"""JSON of the confirm stage: see `candidates_of` and `HeldOut.to_json`."""
LOSSY = "lossy"
"""JSON: what lossy rules made of the winner, see `LossyRung.to_dict`; only where that was asked for."""
SURFACES = "surfaces"
"""JSON: predictions around the leading configs, see `search.predict.surfaces`."""
BY_REGIME = "by_regime"
"""JSON, in the first regime's study: what each regime's found, see `regime_facts`; in full in summary.json."""
PER_GROUP = "per_group"
"""JSON, in the study over all prompts: see `matrix_facts`."""
ATTACHED = "attached"
"""JSON: artifact id by file name, of the dashboard's store."""
NUM_CONFIRMED = "num_confirmed"
"""Confirm stages that came to an end."""
WORKER_ENTRY = "worker."
"""What the name of a worker's entry in the roster begins with; its number follows."""

# Of a trial: who measures it, what, and why it ended without a number.
PROCESS, WORKER = "process", "worker"
CLAIM = "claim"
"""Its parameters, written in one piece before anything else of it."""
SHARES_DEVICE = "shares_device"
"""The workers that were computing on the same device or cores."""
RETRY_OF, ATTEMPT = "retry_of", "attempt"
"""Of a trial that measures again what a dead one was to measure: that one's number; 2 or 3."""
FAILURE = "failure"
"""Of a failed trial: why."""
VIOLATION, VIOLATION_PROMPT = "violation", "violation_prompt"
"""Of one whose output was not the target's."""

# Of a trial: who proposed it, and what it decodes with.
ORIGIN, REPEAT_OF = "origin", "repeat_of"
CONSIDERED = "considered"
"""Configs that were predicted for its proposal, see `Candidates.write`."""
EXPECTED_GAIN = "expected_gain"
"""What the best config not measured then was expected to gain on the best measured one."""
PROPOSING_S = "proposing_s"
TRIAL_DRAFTER, SKIP_MASK, LOOKUP, DRAFT_WEIGHTS = "drafter", "skip_mask", "lookup", "draft_weights"
NUM_SKIPPED_ATTENTION, NUM_SKIPPED_MLP = "num_skipped_attention", "num_skipped_mlp"

# Of a trial: what it was expected to show, see `Outlook.describe_trial`.
PREDICTED_RATIOS, PREDICTED_SPEEDUP = "predicted_ratios", "predicted_speedup"
PREDICTED_TOKENS_PER_S = "predicted_tokens_per_s"
FORECAST_RATIOS, FORECAST_SPEEDUP = "forecast_ratios", "forecast_speedup"
REPLAYED_FORWARDS, DRAFT_STEP_MS = "replayed_forwards", "draft_step_ms"

# Of a trial: what it measured.
SPEEDUP, SPEEDUP_CI_LOW, SPEEDUP_CI_HIGH = "speedup", "speedup_ci_low", "speedup_ci_high"
"""As on the average prompt, see `Standings.standardised`."""
SPEEDUP_MEASURED = "speedup_measured"
TOKENS_PER_S = "tokens_per_s"
"""Where its value is something else."""
STOPPED_EARLY, LOSSLESS = "stopped_early", "lossless"
NUM_PROMPTS, PROMPT_STEPS, RATIOS = "num_prompts", "prompt_steps", "ratios"
NUM_TIES, IS_TIE_BY_PROMPT = "num_ties", "is_tie_by_prompt"
TOKENS_PER_S_BY_PROMPT, PLAIN_TOKENS_PER_S_BY_PROMPT = "tokens_per_s_by_prompt", "plain_tokens_per_s_by_prompt"
ACCEPTANCE_RATE, MEAN_ACCEPTED_LENGTH = "acceptance_rate", "mean_accepted_length"
ACCEPTED_BY_POSITION, DRAFTED_BY_POSITION = "accepted_by_position", "drafted_by_position"
NUM_TARGET_ONLY, FORWARDS = "num_target_only", "forwards"
DRAFT_S, VERIFY_S, SECONDS = "draft_s", "verify_s", "seconds"
PLAIN_STEP, ROUNDS, COUNTS = "plain_step_s", "round_s_by_drafted", "rounds_by_drafted"
"""A plain step beside its own steps, and its rounds' seconds and numbers by number of drafts."""
NUM_SIBLINGS = "num_siblings"
"""Verified in these rounds; only where there are any."""
LOOKUP_ROUNDS, LOOKUP_COUNTS = "lookup_round_s_by_drafted", "lookup_rounds_by_drafted"
"""The same of rounds that were looked up; only where there are any."""

PER_DEVICE = frozenset(
    {
        REFERENCE,
        PLAIN_TOKENS_PER_S,
        NOISE_SIGMA,
        COSTS,
        SENSITIVITY,
        POOL,
        READINGS,
        TEXTS,
        MORE,
        LOOKUPS,
        GAMMA_LOWERED,
    }
)
"""Of a study: kept once for each device."""
SHARED = frozenset(
    {
        DRAFT_IDS,
        FINGERPRINT,
        ENVIRONMENT,
        SPEC,
        COMMAND,
        CREATED_AT,
        FIRST_PLAN,
        CANNOT_WIN,
        ROUNDING,
        BUDGET,
        VERDICT,
        REASON,
        CONFIRMED,
        CONFIRMED_ON,
        CONFIG,
        CANDIDATES,
        HELD_OUT,
        LOSSY,
        SURFACES,
        BY_REGIME,
        PER_GROUP,
        ATTACHED,
        NUM_CONFIRMED,
    }
)
"""Of a study: one for all its workers, beside the roster's entries."""
