"""Each storage against the real thing: several processes at once, servers that restart, and the proxy."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from layerskip import DecodeConfig
from search import storage_proxy
from search.dashboard import open_app
from search.storages.address import redact
from search.storages.errors import ConnectionLost, StorageError, StorageLost
from search.storages.opening import check_storage, close_storage, open_storage
from search.storages.patient import PatientStorage, RetryPolicy
from search.study.spec import to_toml
from search.study.trials import counted
from tests.search.chaos import audit as audit_search
from tests.search.chaos import kill_at_random
from tests.search.helpers.crew_member import Order
from tests.search.helpers.fakes import Bench, make_spec
from tests.search.helpers.servers import PASSWORD, ROOT, PostgresServer, child_environment, running_proxy

pytestmark = pytest.mark.slow

STORAGES = ("sqlite", "journal", "postgres", "grpc")
NUM_WORKERS = 4
NUM_QUEUED = 40
WORKERS = """
import sys, optuna
from search.storages.opening import close_storage, open_storage
optuna.logging.set_verbosity(optuna.logging.ERROR)
print("ready", flush=True)
sys.stdin.readline()
for url in sys.argv[1:]:
    storage = open_storage(url)
    study = optuna.create_study(study_name="queue", storage=storage, load_if_exists=True)
    study.optimize(lambda trial: trial.suggest_int("x", 0, 99), n_trials=10)
    close_storage(storage)
"""
ENDLESS = """
import sys, optuna
from search.storages.opening import open_storage

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.load_study(study_name="long", storage=open_storage(sys.argv[1]))
stop = optuna.study.MaxTrialsCallback(int(sys.argv[2]), states=(optuna.trial.TrialState.COMPLETE,))
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    trial.set_user_attr("worker", sys.argv[3])
    trial.set_user_attr("twice", 2 * x)
    return x
study.optimize(objective, callbacks=[stop])
"""


def start(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=child_environment(), cwd=ROOT, text=True, **options
    )


# Several processes at once


@pytest.fixture(scope="module")
def raced(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Empty databases of every kind, all opened by four processes at once, that then run ten trials each."""
    folder = tmp_path_factory.mktemp("raced")
    urls = {"sqlite": f"sqlite:///{folder / 's.db'}", "journal": f"journal:{folder / 's.log'}"}
    urls |= {"postgres": postgres_server.new_database()}
    with running_proxy(postgres_server.new_database()) as proxy:
        urls |= {"grpc": proxy.url}
        queued = {f"{name} queued": url for name, url in queued_studies(postgres_server, folder).items()}
        with ExitStack() as stack:
            second = stack.enter_context(running_proxy(queued.pop("grpc queued")))
            queued["grpc queued"] = second.url
            for url in queued.values():
                storage = open_storage(url)
                study = optuna.create_study(study_name="queue", storage=storage)
                for x in range(NUM_QUEUED):
                    study.enqueue_trial({"x": x})
                close_storage(storage)
            urls |= queued
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers = [start(WORKERS, *urls.values(), **pipes) for _ in range(NUM_WORKERS)]
            for worker in workers:
                assert worker.stdout.readline() == "ready\n"
            for worker in workers:
                worker.stdin.write("go\n")
                worker.stdin.flush()
            assert [worker.wait(timeout=300) for worker in workers] == [0] * NUM_WORKERS
            for worker in workers:
                worker.communicate()
            yield urls


def queued_studies(server: PostgresServer, folder: Path) -> dict[str, str]:
    return {
        "sqlite": f"sqlite:///{folder / 'q.db'}",
        "journal": f"journal:{folder / 'q.log'}",
        "postgres": server.new_database(),
        "grpc": server.new_database(),
    }


def trials_in(url: str, name: str) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(url)
    try:
        return optuna.load_study(study_name=name, storage=storage).get_trials()
    finally:
        close_storage(storage)


@pytest.mark.parametrize("kind", STORAGES)
def test_workers_that_start_together_share_a_new_study(raced: dict[str, str], kind: str) -> None:
    trials = trials_in(raced[kind], "queue")
    assert [trial.number for trial in trials] == list(range(10 * NUM_WORKERS))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}


@pytest.mark.parametrize("kind", STORAGES)
def test_queued_trials_are_run_once_by_several_processes(raced: dict[str, str], kind: str) -> None:
    trials = trials_in(raced[f"{kind} queued"], "queue")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert sorted(trial.params["x"] for trial in trials) == list(range(NUM_QUEUED))


# Whole searches


def history(bench: Bench, url: str) -> list[tuple[Any, ...]]:
    return [(one.params, one.value, one.user_attrs["origin"]) for one in trials_in(url, bench.folder.name)]


@pytest.mark.parametrize("kind", ["journal", "postgres", "grpc"])
def test_a_search_is_the_same_on_every_storage(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, kind: str
) -> None:
    here = Bench(tmp_path_factory.mktemp("sqlite"), in_sqlite=True)
    assert here.run(trials=12) == 0
    url = f"journal:{bench.folder / 'study.log'}" if kind == "journal" else request.getfixturevalue(f"{kind}_url")
    assert bench.run(trials=8, storage=url) == 0
    assert Bench(bench.folder).run(trials=12, storage=url) == 0
    assert history(bench, url) == history(here, f"sqlite:///{here.folder / 'study.db'}")
    assert DecodeConfig.load(bench.paths.best).skip_mask == DecodeConfig.load(here.paths.best).skip_mask
    assert PASSWORD not in bench.paths.summary.read_text()


@pytest.mark.parametrize("kind", ["journal", "grpc"])
def test_two_searches_share_a_study_while_others_are_killed(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    # On SQLite and PostgreSQL: tests/search/test_chaos.py.
    url = f"journal:{tmp_path / 'study.log'}" if kind == "journal" else request.getfixturevalue("grpc_url")
    order = Order(tmp_path, url, study_name=tmp_path.name, trials=10)
    kill_at_random(order, kills=2, num_workers=2, seed=2)
    audit_search(order)


@pytest.mark.parametrize("kind", ["postgres", "grpc"])
def test_the_dashboard_shows_studies_on_servers(bench: Bench, request: pytest.FixtureRequest, kind: str) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    assert bench.run(trials=3, storage=url) == 0
    bench.paths.spec_file.write_text(to_toml(make_spec(), bench.folder))
    app, page, _ = open_app(str(bench.folder), url)
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    study_id = page.rpartition("/")[2]
    environ["PATH_INFO"] = f"/api/studies/{study_id}"
    shown = json.loads(b"".join(app(environ, lambda *_answer: None)))
    assert (shown["name"], len(shown["trials"])) == (bench.folder.name, 3)


# Servers that restart


def restart_once(server: PostgresServer, how: str, at: int) -> Callable[[DecodeConfig], None]:
    """Stops the server at the given decode; it comes back while the search is waiting for it."""
    calls = iter(range(10**9))

    def hook(_config: DecodeConfig) -> None:
        if next(calls) == at:
            server.stop(how)
            threading.Timer(1.0, server.start).start()

    return hook


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_search_waits_for_a_restarting_database(
    bench: Bench,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PostgresServer,
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    here = Bench(tmp_path_factory.mktemp("sqlite"), in_sqlite=True)
    assert here.run(trials=12) == 0
    bench.decoder.break_on = restart_once(postgres_server, how, at=120)
    assert bench.run(trials=12, storage=postgres_url) == 0
    assert history(bench, postgres_url) == history(here, f"sqlite:///{here.folder / 'study.db'}")
    said = [line for line in caplog.messages if line.startswith(f"storage {redact(postgres_url)}: ")]
    assert len(said) == 2
    assert said[0].endswith("waiting up to 600 s for it")
    assert "answers again after" in said[1]
    assert PASSWORD not in caplog.text


def audit(url: str, num_trials: int) -> None:
    """Every trial of the study `long` is whole, and none is open."""
    trials = trials_in(url, "long")
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert num_trials <= len(trials) <= num_trials + 2
    assert all(trial.user_attrs["twice"] == 2 * trial.params["x"] == 2 * (trial.value or 0) for trial in trials)
    assert {trial.user_attrs["worker"] for trial in trials} == {"a", "b"}


def wait_for_trials(study: optuna.Study, count: int, workers: list[subprocess.Popen[str]]) -> None:
    while counted(study.get_trials(deepcopy=False)) < count:
        assert all(worker.poll() in (None, 0) for worker in workers)


@pytest.mark.parametrize("kind", ["postgres", "grpc"])
def test_workers_survive_servers_that_restart_again_and_again(
    postgres_server: PostgresServer, postgres_url: str, kind: str
) -> None:
    total = 120
    with ExitStack() as stack:
        proxy = stack.enter_context(running_proxy(postgres_url)) if kind == "grpc" else None
        url = postgres_url if proxy is None else proxy.url
        direct = open_storage(postgres_url)
        stack.callback(close_storage, direct)
        study = optuna.create_study(study_name="long", storage=direct)
        workers = [start(ENDLESS, url, str(total), name) for name in ("a", "b")]
        for worker in workers:
            stack.callback(worker.kill)
        for finished, how in ((10, "fast"), (40, "immediate"), (70, "immediate")):
            wait_for_trials(study, finished, workers)
            postgres_server.restart(how)
        if proxy is not None:
            wait_for_trials(study, 90, workers)
            proxy.stop()
            proxy.start()
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
        audit(url, total)


def test_a_trial_that_a_proxy_has_not_seen_goes_on(postgres_url: str) -> None:
    """Optuna's cache in a proxy that was started again knew nothing of it, and refused its parameters."""
    with running_proxy(postgres_url) as proxy:
        storage = open_storage(proxy.url)
        study = optuna.create_study(study_name="s", storage=storage)
        trial = study.ask()
        proxy.stop()
        proxy.start()
        x = trial.suggest_float("x", 0, 1)
        study.tell(trial, x)
        (told,) = study.trials
        assert (told.params, told.value) == ({"x": x}, x)
        with pytest.raises(KeyError):
            storage.set_trial_param(10**6, "x", 0.5, told.distributions["x"])
        close_storage(storage)


def test_a_database_that_stays_away_is_given_up_in_one_line(postgres_server: PostgresServer, postgres_url: str) -> None:
    storage = open_storage(postgres_url, policy=RetryPolicy(limit_s=0.3))
    study = optuna.create_study(study_name="s", storage=storage)
    postgres_server.stop()
    try:
        with pytest.raises(StorageLost) as caught:
            study.set_user_attr("a", 1)
        assert str(caught.value).startswith(f"storage {redact(postgres_url)}: no answer for ")
        assert "\n" not in str(caught.value)
        assert PASSWORD not in str(caught.value)
        with pytest.raises(StorageError, match="storage postgresql"):
            open_storage(postgres_url)
    finally:
        postgres_server.start()
    study.set_user_attr("a", 2)
    assert study.user_attrs == {"a": 2}
    close_storage(storage)


def test_a_search_ends_in_one_line_if_the_database_stays_away(
    bench: Bench, postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = functools.partial(open_storage, policy=RetryPolicy(limit_s=0.3))
    monkeypatch.setattr("search.pipeline.open_storage", opened)
    calls = iter(range(10**9))
    bench.decoder.break_on = lambda _config: postgres_server.stop() if next(calls) == 70 else None
    try:
        with pytest.raises(StorageLost, match=r"no answer for .*; the same command continues the study"):
            bench.run(trials=12, storage=postgres_url)
    finally:
        postgres_server.start()
    assert Bench(bench.folder).run(trials=12, storage=postgres_url) == 0
    trials = trials_in(postgres_url, bench.folder.name)
    assert counted(trials) == 12
    assert all(trial.state.is_finished() for trial in trials)


class Forgetful(BaseStorage):
    """A real storage whose next answer is lost on the way, although the call took effect."""

    def __init__(self, inner: BaseStorage) -> None:
        self.inner = inner
        self.loses: str | None = None

    def __getattribute__(self, name: str) -> Any:
        mine = object.__getattribute__(self, "__dict__")
        if name in ("inner", "loses", "__dict__", "__class__"):
            return object.__getattribute__(self, name)
        function = getattr(mine["inner"], name)

        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if name == mine["loses"]:
                mine["loses"] = None
                raise ConnectionLost("the answer is lost")
            return result

        return call


Forgetful.__abstractmethods__ = frozenset()  # everything is passed on


@pytest.fixture
def forgetful(postgres_url: str) -> Iterator[tuple[Forgetful, PatientStorage]]:
    opened = open_storage(postgres_url)
    assert isinstance(opened, PatientStorage)
    inner = Forgetful(opened.inner)
    yield inner, PatientStorage(inner, "shown", RetryPolicy(first_pause_s=0.001))
    close_storage(opened)


@pytest.mark.parametrize("template", [None, create_trial(state=TrialState.WAITING, system_attrs={"fixed_params": {}})])
def test_a_trial_whose_creation_was_not_answered_is_not_created_twice(
    forgetful: tuple[Forgetful, PatientStorage], template: optuna.trial.FrozenTrial | None
) -> None:
    inner, storage = forgetful
    study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")
    first = storage.create_new_trial(study_id, template)
    inner.loses = "create_new_trial"
    second = storage.create_new_trial(study_id, template)
    assert [trial._trial_id for trial in storage.get_all_trials(study_id)] == [first, second]
    assert {trial.state for trial in storage.get_all_trials(study_id)} == {
        TrialState.RUNNING if template is None else TrialState.WAITING
    }


def test_calls_whose_answer_was_lost_are_harmless_when_made_again(
    forgetful: tuple[Forgetful, PatientStorage],
) -> None:
    inner, storage = forgetful
    study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")
    trial_id = storage.create_new_trial(study_id)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("set_study_user_attr", (study_id, "a", 1)),
        ("set_study_system_attr", (study_id, "b", 2)),
        ("set_trial_param", (trial_id, "x", 3.0, optuna.distributions.IntDistribution(0, 9))),
        ("set_trial_intermediate_value", (trial_id, 1, 0.5)),
        ("set_trial_user_attr", (trial_id, "c", 4)),
        ("set_trial_system_attr", (trial_id, "d", 5)),
        ("set_trial_state_values", (trial_id, TrialState.COMPLETE, [7.0])),
    ]
    for name, arguments in calls:
        inner.loses = name
        getattr(storage, name)(*arguments)
        assert inner.loses is None, f"{name} was not called"
    trial = storage.get_trial(trial_id)
    assert (trial.state, trial.value, trial.params, trial.user_attrs["c"]) == (TrialState.COMPLETE, 7.0, {"x": 3}, 4)
    assert trial.intermediate_values == {1: 0.5}
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):  # told another end before: that is an error
        storage.set_trial_state_values(trial_id, TrialState.FAIL)
    inner.loses = "delete_study"
    storage.delete_study(study_id)
    assert storage.get_all_studies() == []


# The proxy


def test_the_proxy_says_where_it_is_and_ends_on_sigterm(postgres_url: str) -> None:
    with running_proxy(postgres_url) as proxy:
        assert proxy.greeting == f"{proxy.url} in front of {redact(postgres_url)}\n"
        assert PASSWORD not in proxy.greeting
        check_storage(proxy.url)
        assert proxy.stop(signal.SIGTERM) == 0
        with pytest.raises(StorageError, match=f"storage {proxy.url}: storage proxy: nobody answers"):
            check_storage(proxy.url)


def test_the_password_may_be_in_the_environment(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    url = postgres_url.replace(f":{PASSWORD}@", "@")
    check_storage(url)
    assert redact(url) == url
    with running_proxy(url) as proxy:
        assert proxy.greeting == f"{proxy.url} in front of {url}\n"


def test_many_workers_behind_the_proxy_need_few_connections(postgres_server: PostgresServer, postgres_url: str) -> None:
    with running_proxy(postgres_url, "--threads", "2") as proxy:
        storages = [open_storage(proxy.url) for _ in range(12)]
        study = optuna.create_study(study_name="s", storage=storages[0])
        threads = [
            threading.Thread(target=storage.set_study_user_attr, args=(study._study_id, f"a{i}", i))
            for i, storage in enumerate(storages)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert study.user_attrs == {f"a{i}": i for i in range(12)}
        assert 1 <= postgres_server.num_connections(postgres_url) <= 3
        for storage in storages:
            close_storage(storage)


def test_the_proxy_asks_for_its_key(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "correct-horse-battery"
    with running_proxy(postgres_url, key=key) as proxy:
        for given in (None, "wrong-horse-battery"):
            if given is None:
                monkeypatch.delenv("LAYERSKIP_API_KEY", raising=False)
            else:
                monkeypatch.setenv("LAYERSKIP_API_KEY", given)
            for function in (check_storage, open_storage):
                with pytest.raises(StorageError, match="the key is missing or wrong") as caught:
                    function(proxy.url)
                assert "horse" not in str(caught.value)
        monkeypatch.setenv("LAYERSKIP_API_KEY", key)
        storage = open_storage(proxy.url)
        assert optuna.get_all_study_names(storage) == []
        close_storage(storage)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--storage: is required, or LAYERSKIP_STORAGE in the environment"),
        (["--storage", "sqlite:///a.db"], "--storage: must be the URL of a database server, got sqlite:///a.db"),
        (["--storage", "grpc://h:1"], "--storage: must be the URL of a database server, got grpc://h:1"),
        (["--storage", "postgresql://h/d", "--port", "70000"], "--port: must be in 0..65535, got 70000"),
        (["--storage", "postgresql://h/d", "--threads", "0"], "--threads: must be in 1..15, got 0"),
        (["--storage", "postgresql://h/d", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines"),
        (
            ["--storage", "postgresql+psycopg://me:s3cret@127.0.0.1:1/d"],
            "storage postgresql+psycopg://me:***@127.0.0.1",
        ),
    ],
)
def test_bad_flags_of_the_proxy_are_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAYERSKIP_STORAGE", raising=False)
    assert storage_proxy.main(flags) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"search.storage_proxy: error: {said}")
    assert shown.err.count("\n") == 1
    assert PASSWORD not in shown.err
    assert shown.out == ""


def test_a_port_serves_one_proxy(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running_proxy(postgres_url) as proxy:
        assert storage_proxy.main(["--storage", postgres_url, "--port", str(proxy.port)]) == 2
        assert f"cannot serve on 127.0.0.1:{proxy.port}: taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["grpc://", "grpc://:13000", "grpc://h:x", "grpc://me:s3cret@h:1", "grpc://h:1/db", "grpc://h:1?a=b"]
)
def test_proxy_urls_of_another_form_are_refused(url: str) -> None:
    for function in (check_storage, open_storage):
        with pytest.raises(StorageError, match="must have the form grpc://HOST:PORT") as caught:
            function(url)
        assert PASSWORD not in str(caught.value)


def test_what_the_proxy_could_not_do_is_one_line(postgres_url: str) -> None:
    with running_proxy(postgres_url) as proxy:
        storage = open_storage(proxy.url)
        study = optuna.create_study(study_name="s", storage=storage)
        with pytest.raises(KeyError):
            storage.get_trial(12345)
        with pytest.raises(optuna.exceptions.StorageInternalError) as caught:
            study.set_user_attr("a\0b", 1)  # PostgreSQL takes no NUL in texts
        assert "\n" not in str(caught.value)
        assert "NUL" in str(caught.value)
        close_storage(storage)
