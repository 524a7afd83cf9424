"""python -m search.run: find the fastest lossless way to decode a model on this device."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from typing import TYPE_CHECKING, get_args

from layerskip.command_line.cli import (
    OneLineParser,
    plain_warnings,
    print_error,
    quiet_libraries,
    run_command,
    split_list,
)
from layerskip.config.decode_config import ABOUT_QUANTIZATION, WAYS, QuantizationName
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.huggingface.device_map import ABOUT_DEVICE_MAP, parse_device_map, refuse_torchrun
from search.command_line import add_output_flags, demo_folder
from search.stop import StopSignal
from search.storages.address import STORAGE_VARIABLE, storage_argument
from search.study.spec import (
    DTypeName,
    EngineName,
    Granularity,
    ObjectiveName,
    SamplerName,
    StudyPaths,
    StudySpec,
    load_spec,
)

if TYPE_CHECKING:
    from search.measure.subject import Subject
    from search.study.prompts import PromptSet
    from search.terminal.reporter import Reporter
    from search.workers.launch import Post

PROG = "search.run"
_EPILOG = """\
Without flags: the demo study. With --model and --prompts: a new study folder, studies/MODEL-DEVICE, or the one --study
names. The same command again continues the study up to --trials; started while it runs, here or on another host that
reaches the storage, it is one more worker of the study. Exit codes: 0 done (also where the answer is "do not
speculate"), 1 outputs were not lossless or trials kept failing, 2 bad input, 124 a trial hung (--trial-timeout), 129,
130 and 143 stopped by a signal."""
_ABOUT_FLAGS = {
    "model": "Hugging Face id or folder",
    "prompts": "JSONL file of tuning prompts",
    "held_out": "JSONL file of held-out prompts; without it, split off from --prompts",
    "storage": f"Optuna storage: an RDB URL or journal:PATH; or set {STORAGE_VARIABLE}",
    "study_name": "name inside the storage",
    "device": "auto, cpu, cuda, cuda:N or mps",
    "device_map": ABOUT_DEVICE_MAP,
    "revision": "branch, tag or commit of a hub model",
    "group_field": "field of a prompt's record that names its group (default: category)",
}
_ABOUT_NUMBERS = {
    "trials": (int, "trials in the study in total"),
    "timeout": (float, "seconds of searching in this run; the confirm stage follows all the same"),
    "budget": (float, "minutes that the whole run may take; what is measured less for it is told"),
    "trial_seconds": (float, "seconds a full trial should take; decides its number of prompts"),
    "max_new_tokens": (int, "tokens decoded per prompt"),
    "gamma_max": (int, "most draft tokens per round under a mask (default: 16, or what the texts have room for)"),
    "seed": (int, "seed of everything random"),
    "threads": (int, "CPU threads of torch; without it, measured"),
    "trial_timeout": (
        float,
        "seconds after which a trial that has not ended is failed; one that hangs ends the process",
    ),
}
_ABOUT_CHOICES = {
    "dtype": (DTypeName, "number format"),
    "quantization": (QuantizationName, ABOUT_QUANTIZATION),
    "engine": (EngineName, "how one forward is executed"),
    "granularity": (Granularity, "what a bit of the mask skips"),
    "objective": (ObjectiveName, "what is maximised; unlike devices can share a study of the speedup"),
    "sampler": (SamplerName, "who proposes configs"),
}
_ABOUT_LISTS = {
    "drafters": f"ways to draft that are searched, of {','.join(WAYS)} (default: all, which is those that need no "
    "weights, those that are given some by --draft-weights, and mtp where the model's checkpoint has such a layer)",
    "draft_weights": "folders made by layerskip.train, and folders or hub ids of smaller models, "
    "whatever their tokenizer: they draft too, and the search says which of them should",
    "regimes": "ways to choose tokens, such as greedy,t0.7,t1_p0.9, each searched apart with an equal share of the "
    "trials and given a setting of its own (default: the one of the model's generation_config)",
}
_ABOUT_SEARCHED = {
    "draft_vocab": "search too over how many token ids a draft chooses from, those that the model holds likeliest "
    "on the tuning prompts (default: where the model can)",
    "int8": "search too over drafts that compute with 8-bit copies of the weights (default: where the device can)",
    "int4": "and with 4-bit copies (default: where sublayers are compiled for the CPU)",
    "siblings": "search too over what else is verified in each draft token's place (default: where the engine can)",
    "trees": "search too over trees in place of chains of what eagle and mtp draft (default: where the engine can)",
}
"""Each has a --no- beside it."""
_ABOUT_SWITCHES = {
    "trust_remote_code": "let the model's repository run its own code",
    "per_group": "search each group of prompts apart as well, --trials trials each; export a setting per group",
    "allow_lossy": "measure lossy rules on the confirmed winner too, each told with its distance from the target and "
    "written as a file of its own; best.json stays lossless",
    "force": "search on where predictions say that nothing can win",
}
_SAMPLING = {one.name: type(one.default) for one in dataclasses.fields(SamplingParams) if one.name != "do_sample"}
_FIELDS = {
    "budget": "budget_minutes",
    "timeout": "timeout_s",
    "threads": "num_threads",
    "trial_timeout": "trial_timeout_s",
}
_NOT_OF_THE_SPEC = ("study", "dry_run", "quiet", "json", "workers", "devices", "reap")


def build_parser() -> OneLineParser:
    """Flags override study.toml; what is not given has no default here."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", help="study folder, or its study.toml")
    for name, about in _ABOUT_FLAGS.items():
        parser.add_argument(_flag(name), help=about)
    for name, (kind, about) in _ABOUT_NUMBERS.items():
        parser.add_argument(_flag(name), type=kind, metavar="N", help=about)
    parser.add_argument(
        "--until-settled",
        type=float,
        nargs="?",
        const=1.0,
        metavar="PERCENT",
        help="end the trials when no other config is expected to beat the best measured one by more than so many per "
        "cent, and the choice among the best when it is expected to miss no more (default where no number is given: "
        "%(const)s)",
    )
    for name, (choices, about) in _ABOUT_CHOICES.items():
        parser.add_argument(_flag(name), choices=get_args(choices), help=about)
    for name, about in _ABOUT_LISTS.items():
        parser.add_argument(_flag(name), type=split_list, metavar="LIST", help=about)
    for name, kind in _SAMPLING.items():
        parser.add_argument(_flag(name), type=kind, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--do-sample",
        action="store_true",
        help="tune for sampled text, chosen by --temperature, --top-p, --top-k, --min-p and --repetition-penalty, "
        "--presence-penalty and --frequency-penalty with the defaults of generate: another way to name one regime",
    )
    for name, about in _ABOUT_SEARCHED.items():
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=about)
    for name, about in _ABOUT_SWITCHES.items():
        parser.add_argument(_flag(name), action="store_true", default=None, help=about)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes on this host, each on a GPU or cores of its own"
    )
    parser.add_argument("--devices", metavar="LIST", help="their devices, such as cuda:0,cuda:1; one process each")
    parser.add_argument(
        "--reap", action="store_true", help="fail and queue again what dead workers left, say what was done, and end"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    add_output_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    flags = vars(arguments).copy()
    for name in _NOT_OF_THE_SPEC:
        del flags[name]
    refuse_torchrun(
        "for a worker per device use --devices cuda:0,cuda:1, for a model larger than one device --device-map auto"
    )
    flags["regimes"] = _regimes(arguments)
    for name in ("do_sample", *_SAMPLING):
        del flags[name]
    flags |= {"storage": storage_argument(arguments.storage), "device_map": parse_device_map(arguments.device_map)}
    spec, paths = load_spec(
        {_FIELDS.get(name, name): value for name, value in flags.items()}, arguments.study, demo=demo_folder()
    )
    if arguments.reap:
        return _reap(spec, paths)
    spec, posts = _man(spec, arguments)
    if len(posts) > 1:
        return _launch(spec, paths, posts, arguments, argv)
    stop = StopSignal(ends_process=True)
    with stop.installed():
        try:
            return _search(spec, paths, arguments, argv, stop)
        except KeyboardInterrupt:
            print_error(PROG, f"stopped; the same command continues study {paths.study_name(spec)!r}")
            return stop.exit_code


def _regimes(arguments: argparse.Namespace) -> list[str] | None:
    """Those of --regimes, or the one that the flags of `generate` describe."""
    given = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
    if not given and not arguments.do_sample:
        names: list[str] | None = arguments.regimes
        return names
    if arguments.regimes is not None:
        raise ValueError("regimes: must be given alone, --do-sample and the flags beside it name one by themselves")
    return [Sampling(do_sample=arguments.do_sample, **given).name]


def _search(
    spec: StudySpec, paths: StudyPaths, arguments: argparse.Namespace, argv: list[str], stop: StopSignal
) -> int:
    from search.storages.address import redact
    from search.storages.opening import check_storage, check_writable

    start = time.perf_counter()
    command = shlex.join(["python", "-m", PROG, *map(redact, argv)])
    prompt_sets = _read_prompts(spec)
    check_storage(paths.storage_url(spec))
    if not arguments.dry_run:
        check_writable(paths.folder)
    from search.context import Tools
    from search.per_group.run import GroupRun
    from search.pipeline import SearchRun
    from search.preflight import open_subject
    from search.regime_run import RegimeRun, regime_study
    from search.study.opening import as_before
    from search.terminal.live import make_reporter

    quiet_libraries()
    with make_reporter(quiet=arguments.quiet, json_lines=arguments.json) as reporter:
        before = regime_study(spec, paths, spec.regimes[0])[0] if spec.regimes else spec
        subject = open_subject(as_before(before, paths), paths, prompt_sets)
        _tell_plan(reporter, spec, subject)
        if arguments.dry_run:
            _tell_time(reporter, spec, paths, subject)
            return 0
        _make_folder(reporter, spec, paths)
        load_s = time.perf_counter() - start
        kind = GroupRun if spec.per_group else RegimeRun if spec.has_several_regimes else SearchRun
        return kind(subject, spec, paths, Tools(reporter, stop, command), load_s=load_s).run()


def _man(spec: StudySpec, arguments: argparse.Namespace) -> tuple[StudySpec, list[Post]]:
    """The posts that --workers and --devices ask for; a single one is taken by this process. Warns on stderr."""
    from layerskip.machine.host import own_cores
    from search.workers.launch import assign_posts, devices_for, parse_devices

    if spec.device_map is not None and (arguments.devices is not None or arguments.workers not in (None, 1)):
        raise ValueError(
            "device_map: spreads one worker over all devices of this host, so --workers and --devices must not be "
            "given beside it; the same command on another host is one more worker"
        )
    devices = devices_for(arguments.workers, parse_devices(arguments.devices), spec.device)
    posts, warnings = assign_posts(devices, spec.num_threads, own_cores())
    if len(posts) > 1 and spec.per_group:
        raise ValueError(f"workers: must be 1 for a per-group search, got {len(posts)}")
    if len(posts) > 1 and spec.has_several_regimes:
        raise ValueError(f"workers: must be 1 for several regimes, got {len(posts)}; search them one by one")
    for text in warnings:
        sys.stderr.write(f"warning: {text}\n")
    return (spec.model_copy(update={"device": posts[0].device}) if len(posts) == 1 else spec), posts


def _launch(
    spec: StudySpec, paths: StudyPaths, posts: list[Post], arguments: argparse.Namespace, argv: list[str]
) -> int:
    """Check what can be checked before several processes say it, then one process per post."""
    from search.storages.opening import check_storage, check_writable
    from search.terminal.live import make_reporter
    from search.workers.launch import Launch

    _read_prompts(spec)
    check_storage(paths.storage_url(spec))
    with make_reporter(quiet=arguments.quiet, json_lines=arguments.json) as reporter:
        reporter.phase("workers", "; ".join(f"[{post.number}] {post}" for post in posts))
        if arguments.dry_run:
            posts = posts[:1]
        else:
            check_writable(paths.folder)
            _make_folder(reporter, spec, paths)
    command = [sys.executable, "-m", PROG, *_without(argv, "--workers", "--devices")]
    if arguments.study is None:
        command += ["--study", str(paths.folder)]
    return Launch(posts, command, json_lines=arguments.json, quiet=arguments.quiet).run()


def _reap(spec: StudySpec, paths: StudyPaths) -> int:
    from search.study.opening import quiet_optuna
    from search.workers.crew import reap

    quiet_optuna()
    return reap(paths.storage_url(spec), paths.study_name(spec), print)


def _without(argv: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    kept, skips = [], False
    for argument in argv:
        if not skips and argument not in flags and not argument.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(argument)
        skips = not skips and argument in flags
    return kept


def _make_folder(reporter: Reporter, spec: StudySpec, paths: StudyPaths) -> None:
    """With its study.toml, where there is none."""
    from search.confirm.files import save_spec

    paths.folder.mkdir(parents=True, exist_ok=True)
    if not paths.spec_file.exists():
        if save_spec(spec, paths):
            reporter.warn(f"{paths.spec_file} holds the storage's password; only you can read it, keep it so")
        reporter.phase("preflight", f"new study folder {paths.folder}")


def _read_prompts(spec: StudySpec) -> tuple[PromptSet, PromptSet]:
    from search.study.grouping import Grouping, count_groups
    from search.study.prompts import load_prompts

    plain_warnings()  # of what is read
    sets = load_prompts(spec.prompts, spec.held_out, Grouping(spec.group_field, required=spec.per_group))
    if spec.per_group:
        count_groups(sets[0].prompts, sets[1].prompts)
    return sets


def _tell_plan(reporter: Reporter, spec: StudySpec, subject: Subject) -> None:
    from search.study.grouping import count_groups
    from search.terminal.progress_events import preflight_passed

    groups = count_groups(subject.tuning, subject.held_out) if spec.per_group else None
    regimes = spec.regimes or (subject.sampling.name,)
    is_split = spec.held_out is None
    reporter.tell(preflight_passed(subject, spec.group_field, regimes, groups, is_split=is_split))


def _tell_time(reporter: Reporter, spec: StudySpec, paths: StudyPaths, subject: Subject) -> None:
    from search.per_group.run import group_subjects
    from search.preflight import estimate_groups, estimate_regimes, foresee
    from search.regime_run import regime_study

    if spec.per_group:
        text = estimate_groups(group_subjects(subject), spec)
    elif spec.regimes is not None and spec.has_several_regimes:
        text = estimate_regimes(subject, {name: regime_study(spec, paths, name)[0] for name in spec.regimes})
    else:
        reporter.tell(foresee(subject, spec, None if spec.budget_minutes is None else 60 * spec.budget_minutes))
        text = "nothing was written"
    reporter.phase("dry run", text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    raise SystemExit(main())
