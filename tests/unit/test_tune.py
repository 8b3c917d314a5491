"""Spaces, searches, numbering of reports and results of studies, without a cluster."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import train, tune
from elastic.client.cli import main
from elastic.core.events.shared import Note
from elastic.core.facts import Failure, JobPhase, Node, NodeId, NodePhase, Resources
from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning import decision as tuning
from elastic.core.study import LoggedConfig, TrialAttempt, TrialState
from elastic.core.view import NodeView
from elastic.data import from_items
from elastic.errors import ConfigError, UsageError
from elastic.storage.metrics import Numbering
from elastic.storage.study_log import StudyLog
from elastic.train import FailureConfig, RunConfig, ScalingConfig
from elastic.train.overruled import check_trial
from elastic.train.torch import TorchTrainer
from elastic.tune import space as spaces
from elastic.tune import trainable
from elastic.tune.callback import Callbacks
from elastic.tune.controller import SIZES_MAX, Controller, Plan
from elastic.tune.integration.ray_train import TuneReportCallback
from elastic.tune.logger import JsonLoggerCallback, TBXLoggerCallback
from elastic.tune.result_grid import ResultGrid
from elastic.tune.schedulers import MedianStoppingRule, PopulationBasedTraining
from elastic.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater, Searcher
from elastic.tune.search.optuna import OptunaSearch
from elastic.tune.session import SIZE, Objective, size_asked_by
from elastic.tune.stopper import TrialPlateauStopper, as_stopper
from elastic.tune.trial_function import as_trainable
from elastic.tune.trials import Recipe, from_json, from_log, most_workers, room_for, to_log
from elastic.wire.codec_jobs import TimedNote
from elastic.worker.engine import train_call

optuna.logging.set_verbosity(optuna.logging.ERROR)

# ---------------------------------------------------------------------------------------- spaces


@settings(deadline=None)
@given(
    st.sampled_from([spaces.uniform, spaces.loguniform]),
    st.floats(0.01, 10), st.floats(0.1, 10), st.integers(0, 1000),
)  # fmt: skip
def test_floats_stay_in_their_bounds(kind: Any, low: float, width: float, seed: int) -> None:
    assert low <= kind(low, low + width).sample(Random(seed)) <= low + width
    stepped = spaces.quniform(0, 1, 0.25).sample(Random(seed))
    assert stepped in (0, 0.25, 0.5, 0.75, 1)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 1000))
def test_ints_leave_out_the_upper_bound_unless_they_have_steps(
    low: int, width: int, seed: int
) -> None:
    random = Random(seed)
    assert low <= tune.randint(low, low + width).sample(random) < low + width
    assert low <= tune.lograndint(low, low + width).sample(random) < low + width
    value = tune.qrandint(0, 9, 3).sample(random)
    assert value in (0, 3, 6, 9)
    assert type(value) is int


def test_grids_are_gone_through_and_functions_see_what_was_drawn() -> None:
    search = BasicVariantGenerator()
    search.num_samples = 2
    space = {
        "a": tune.grid_search([1, 2]),
        "inner": {"b": tune.grid_search(["x", "y"]), "list": [tune.choice([7])]},
        "c": tune.sample_from(lambda config: config["a"] * 10),
        "d": tune.sample_from(lambda spec: spec.config.a * 100),
        "kind": tune.choice([{"name": "sgd", "momentum": tune.choice([0.9])}]),
    }
    search.set_space(space, "", "max", 3)
    assert search.total == 8
    configs = [search.suggest(str(number)) for number in range(8)]
    assert [(c["a"], c["inner"]["b"]) for c in configs if c] == [
        (1, "x"), (1, "y"), (2, "x"), (2, "y"),
    ] * 2  # fmt: skip
    assert configs[2] == {
        "a": 2, "inner": {"b": "x", "list": [7]}, "c": 20, "d": 200,
        "kind": {"name": "sgd", "momentum": 0.9},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"lr": tune.uniform}, "param_space/lr is the function tune.uniform itself: call it"),
        ({"o": {1: 2}}, "param_space/o: key 1 is a int, expected a str"),
        ({"x": optuna.distributions.FloatDistribution(0, 1)}, "param_space/x is a optuna.dist"),
        ({"x": {"grid_search": 3}}, "param_space/x: grid_search=3: expected a list"),
    ],
)
def test_a_space_with_a_slip_is_refused_by_its_key(space: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tune.Tuner(print, param_space=space)
    assert said in str(raised.value)


def test_other_slips_are_refused_at_once() -> None:
    def train(config: dict[str, Any]) -> None: ...

    trainer = TorchTrainer(train)
    with pytest.raises(ConfigError, match="'lr' beside 'train_loop_config'"):
        tune.Tuner(trainer, param_space={"train_loop_config": {"a": 1}, "lr": 2})
    with pytest.raises(UsageError, match=r"write: tune\.Tuner\(trainer, param_space="):
        trainer.fit(tune.Tuner(trainer))
    with pytest.raises(UsageError, match="num_workers=0"):
        tune.Tuner(TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0)))
    with pytest.raises(ConfigError, match="without a mode"):
        tune.TuneConfig(metric="loss")
    with pytest.raises(UsageError, match="is a class; expected a function"):
        tune.Tuner(Searcher)
    with pytest.raises(ConfigError, match="low < high"):
        tune.uniform(2, 1)


def test_a_trainer_takes_a_config_in_both_nestings(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None: ...

    trainer = TorchTrainer(train, train_loop_config={"lr": 1, "epochs": 5})
    recipe = Recipe(trainer, RunConfig(), str(tmp_path))
    for config in ({"lr": 2}, {"train_loop_config": {"lr": 2}}):
        made = recipe.trainer("run", config)
        assert made.train_loop_config == {"lr": 2, "epochs": 5}
        assert made.job_spec().run_path == f"{tmp_path}/run"
    assert trainer.train_loop_config == {"lr": 1, "epochs": 5}
    scaled = recipe.trainer("run", {"scaling_config": ScalingConfig(num_workers=(1, 3)), "lr": 3})
    assert scaled.job_spec().max_workers == 3


def test_a_trials_scaling_config_and_datasets_may_be_drawn_in_parts(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None: ...

    small, large = (from_items(list(range(size))) for size in (2, 4))
    workers: Any = tune.grid_search([1, (2, 3)])
    amounts: Any = {"CPU": tune.choice([2])}
    drawn = ScalingConfig(num_workers=workers, resources_per_worker=amounts)
    trainer = TorchTrainer(train, train_loop_config={"lr": 1}, datasets={"train": small})
    tuner = tune.Tuner(
        trainer,
        param_space={
            "scaling_config": drawn,
            "datasets": {"train": tune.grid_search([small, large])},
            "train_loop_config": {"lr": tune.choice([2])},
        },
        run_config=RunConfig(name="n", storage_path=str(tmp_path)),
    )
    search = tuner._search(0)
    assert search.total == 4
    trials = [search.suggest(str(number)) for number in range(4)]
    assert all(config is not None for config in trials)
    assert {config["scaling_config"]["num_workers"] for config in trials if config} == {1, (2, 3)}
    recipe = Recipe(trainer, RunConfig(), str(tmp_path))
    made = [recipe.trainer("run", config or {}) for config in trials]
    specs = [one.job_spec() for one in made]
    assert [(one.min_workers, one.max_workers) for one in specs] == [(1, 1)] * 2 + [(2, 3)] * 2
    assert all(one.resources_per_worker.as_dict() == {"CPU": 2} for one in specs)
    assert [one.datasets["train"] for one in made] == [small, large] * 2
    assert all(one.train_loop_config == {"lr": 2} for one in made)
    assert trainer.datasets == {"train": small}
    assert most_workers(tuner._space) == 3
    assert most_workers({"scaling_config": tune.choice([ScalingConfig(), ScalingConfig(5)])}) == 5
    assert most_workers({"scaling_config": {"num_workers": tune.randint(1, 9)}}) == 8
    with pytest.raises(ConfigError, match=r"num_workers=.*expected a value; a Tuner draws"):
        TorchTrainer(train, scaling_config=drawn)
    for space, said in (
        ({"scaling_config": tune.choice([drawn])}, "num_workers=.*one of several"),
        ({"scaling_config": {"num_workers": 0}}, "num_workers=0: expected 1 or more"),
        ({"run_config": RunConfig()}, r"expected Tuner\(run_config="),
        ({"datasets": "mnist"}, "'datasets'. is a str.*inside of 'train_loop_config'"),
    ):
        with pytest.raises(ConfigError, match=said):
            recipe.trainer("run", spaces.draw(space, Random(0), {}))


def test_a_tuners_run_config_overrides_its_trainers_also_with_a_default(study: StudyLog) -> None:
    def train() -> None: ...

    own = RunConfig(failure_config=FailureConfig(max_failures=3), priority=5)
    tuner = tune.Tuner(
        TorchTrainer(train, run_config=own),
        run_config=RunConfig("n", failure_config=FailureConfig()),
    )
    assert tuner._run_config.failure_config.max_failures == 0
    assert (tuner._run_config.name, tuner._run_config.priority) == ("n", 5)
    tuner._store(study.files)
    restored = tune.Tuner.restore(study.files.path, TorchTrainer(train, run_config=own))
    assert restored._run_config.failure_config.max_failures == 0
    changed = replace(RunConfig(name="a"), name="n", priority=2)
    tuner = tune.Tuner(TorchTrainer(train, run_config=own), run_config=changed)
    assert tuner._run_config == replace(own, name="n", priority=2)
    for where in (TorchTrainer, tune.Tuner):
        asks = RunConfig(checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2))
        with pytest.raises(ConfigError, match="checkpoint_frequency"):
            where(train, run_config=asks)  # type: ignore[operator]


def test_a_study_without_its_configuration_says_why(study: StudyLog) -> None:
    def train() -> None: ...

    tuner = tune.Tuner(TorchTrainer(train))
    tuner._store(study.files)
    stored = study.files.read("tuner.pkl")
    for data, said in (
        (stored[:-1] + b"?", "tuner.pkl is damaged, and was not read"),
        (b"\x80" + stored, "tuner.pkl is of another version, or damaged, and was not read"),
        (None, "tuner.pkl is missing: it was removed, or not copied"),
    ):
        study.files.delete("tuner.pkl")
        if data is not None:
            study.files.write("tuner.pkl", data)
        with pytest.raises(UsageError, match=f"{said}.*; restore the study with the file, version"):
            tune.Tuner.restore(study.files.path, TorchTrainer(train))


class Counting(tune.Trainable):
    def setup(self, config: dict[str, Any], by: int = 1) -> None:
        self.value, self.by, self.is_clean = config["begin"], by, config.get("is_clean", [])

    def step(self) -> dict[str, Any]:
        self.value += self.by
        return {"value": self.value, "done": self.iteration == 3}

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        return {"value": self.value}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.value = checkpoint["value"]

    def cleanup(self) -> None:
        self.is_clean.append(self.value)


class CountingInFiles(Counting):
    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        Path(checkpoint_dir, "value").write_text(str(self.value))
        return checkpoint_dir

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.value = int(Path(checkpoint, "value").read_text())


@pytest.mark.parametrize("kind", [Counting, CountingInFiles])
def test_a_class_steps_saves_and_goes_on_as_a_function_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[tune.Trainable]
) -> None:
    reports: list[tuple[int, str | None]] = []

    def report(metrics: dict[str, Any], *, checkpoint: Any = None) -> None:
        copy = checkpoint and shutil.copytree(checkpoint.path, tmp_path / str(len(reports)))
        reports.append((metrics["value"], copy))

    monkeypatch.setattr(trainable, "report", report)
    monkeypatch.setattr(trainable, "get_checkpoint", lambda: None)
    monkeypatch.setattr(trainable, "get_context", lambda: SimpleNamespace(get_trial_id=lambda: me))
    me = "mine_00001"
    spec = Recipe(as_trainable(tune.with_parameters(kind, by=2)), RunConfig(), str(tmp_path))
    assert spec.trainer("run", {"begin": 10}).train_loop_config == {"begin": 10}
    trainable.steps(kind, 2)({"begin": 10}, by=2)
    assert [(value, bool(path)) for value, path in reports] == [
        (12, False), (14, True), (16, False), (18, True),
    ]  # fmt: skip
    middle, end = (tune.Checkpoint(str(reports[place][1])) for place in (1, 3))
    monkeypatch.setattr(trainable, "get_checkpoint", lambda: middle)
    del reports[:]
    trainable.steps(kind, 0)({"begin": 0})
    assert reports == [(15, None), (16, None)]
    # Killed behind its last step, a trial only cleans up; another trial goes on from there.
    monkeypatch.setattr(trainable, "get_checkpoint", lambda: end)
    is_clean: list[int] = []
    trainable.steps(kind, 0)({"begin": 0, "is_clean": is_clean})
    assert (len(reports), is_clean) == (2, [18])
    me = "mine_00002"
    one_more = kind.step
    monkeypatch.setattr(kind, "step", lambda self: {**one_more(self), "done": True})
    trainable.steps(kind, 0)({"begin": 0})
    assert reports[2:] == [(19, None)]
    every = [trainable.checkpoints_every(kind, *given) for given in ((None, None), (4, None),
             (0, None), (4, True))]  # fmt: skip
    assert every == [1, 4, 0, 1]
    assert trainable.checkpoints_every(tune.Trainable, None, True) == 0


def test_a_class_saves_only_what_is_read_back_without_running_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainable, "get_checkpoint", lambda: None)
    said = r"Counting.save_checkpoint returned a dict that .*value \['value'\] is a numpy.float64"
    with pytest.raises(UsageError, match=said):
        trainable.steps(Counting, 1)({"begin": np.float64(1)})


def test_bundles_of_resources_are_added_up(tmp_path: Path) -> None:
    wish = tune.with_resources(print, tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 2, "x": 1}]))
    spec = Recipe(wish, RunConfig(), str(tmp_path)).trainer("run", {}).job_spec()
    assert spec.resources_per_worker.as_dict() == {"CPU": 3, "x": 1}
    with pytest.raises(ImportError, match=r"search.hyperopt: .*OptunaSearch"):
        import_module("elastic.tune.search.hyperopt")


def test_resources_of_a_function_become_those_of_its_worker(tmp_path: Path) -> None:
    wish = tune.with_resources(print, {"cpu": 2, "custom_resources": {"hdd": 80}})
    own = Recipe(wish, RunConfig(), "/s").trainer("run", {}).scaling_config
    assert own.resources_per_worker == {"CPU": 2, "hdd": 80}
    wish = tune.with_resources(print, lambda config: {"cpu": config["n"], "gpu": 1})
    spec = Recipe(wish, RunConfig(), str(tmp_path)).trainer("run", {"n": 3}).job_spec()
    assert spec.resources_per_worker.as_dict() == {"CPU": 3, "GPU": 1}


@pytest.mark.parametrize(
    "config", [{"a": 1, "b": [1.5, None, "x"]}, {"a": (1, 2)}, {"f": len}, {"x": math.inf}, {}]
)
def test_a_config_comes_back_from_the_log_as_it_was(config: dict[str, Any]) -> None:
    line = to_log(config)
    assert from_log(LoggedConfig.of(line)) == config


# ---------------------------------------------------------------------------------------- search


def value_of(config: Any) -> float:
    return float((config["lr"] - 0.1) ** 2 + config["layers"] * 0.01)


def proposed(search: Searcher, numbers: range) -> list[Any]:
    configs = []
    for number in numbers:
        config = search.suggest(str(number))
        configs.append(config)
        search.on_trial_complete(str(number), {"loss": value_of(config)})
    return configs


SPACE = {
    "lr": tune.loguniform(1e-4, 1.0),
    "layers": tune.randint(1, 5),
    "kind": tune.choice(["a", "b"]),
}


def plain_loop(count: int, sampler: Any) -> list[dict[str, Any]]:
    """What a user of Optuna writes."""
    study, configs = optuna.create_study(direction="minimize", sampler=sampler), []
    for _ in range(count):
        trial = study.ask()
        config = {
            "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
            "layers": trial.suggest_int("layers", 1, 4),
            "kind": trial.suggest_categorical("kind", ["a", "b"]),
        }
        study.tell(trial, value_of(config))
        configs.append(config)
    return configs


def bound(search: Searcher, space: Any = SPACE) -> Searcher:
    search.set_space(space, "loss", "min", 42)
    return search


def test_one_after_the_other_tpe_proposes_what_a_plain_loop_of_optunas_does() -> None:
    plain = plain_loop(25, optuna.samplers.TPESampler(seed=42))
    assert proposed(bound(OptunaSearch()), range(25)) == plain


@pytest.mark.parametrize("name", ["TPESampler", "CmaEsSampler", "NSGAIISampler"])
@pytest.mark.filterwarnings("ignore")
def test_a_search_that_is_told_again_goes_on_as_if_it_had_never_been_away(name: str) -> None:
    def fresh() -> Searcher:
        return bound(OptunaSearch(sampler=getattr(optuna.samplers, name)(seed=1)))

    whole = proposed(fresh(), range(20))
    again = fresh()
    for number, config in enumerate(whole[:12]):
        again.takes_again(str(number), config)
        again.on_trial_complete(str(number), {"loss": value_of(config)})
    assert proposed(again, range(12, 20)) == whole[12:]


def test_conditional_spaces_by_a_function_and_by_choices() -> None:
    def define(trial: Any) -> dict[str, Any]:
        if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
            trial.suggest_float("momentum", 0, 1)
        return {"fixed": 1}

    search = OptunaSearch(define, seed=0)
    search.set_space({}, "loss", "min", 0)
    for number in range(10):
        config = search.suggest(str(number)) or {}
        assert config["fixed"] == 1
        assert ("momentum" in config) == (config["kind"] == "sgd")
    nested = {"opt": tune.choice([{"n": "sgd", "m": tune.uniform(0, 1)}, {"n": "adam"}])}
    found = bound(OptunaSearch(), nested)
    seen = [(found.suggest(str(number)) or {})["opt"] for number in range(10)]
    assert all(("m" in one) == (one["n"] == "sgd") for one in seen)
    with pytest.raises(ConfigError, match="param_space/lr is a grid_search"):
        bound(OptunaSearch(), {"lr": tune.grid_search([1])})


def test_a_limiter_waits_and_a_repeater_tells_the_mean() -> None:
    limited = bound(ConcurrencyLimiter(OptunaSearch(), 2))
    assert limited.suggest("0")
    assert limited.suggest("1")
    assert limited.suggest("2") is None
    limited.on_trial_complete("0", {"loss": 1.0})
    assert limited.suggest("2")

    told: list[Any] = []

    class Noting(Searcher):
        def suggest(self, trial_id: str) -> dict[str, Any]:
            return {"id": trial_id}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            told.append((trial_id, result, error))

    repeater = bound(Repeater(Noting(metric="loss", mode="min"), repeat=2))
    configs = [repeater.suggest(str(number)) for number in range(3)]
    assert configs[1] == {"id": "0", "__trial_index__": 1}
    assert (configs[2] or {})["id"] == "2"
    repeater.on_trial_complete("1", {"loss": 1.0})
    repeater.on_trial_complete("0", {"loss": 3.0})
    assert told == [("0", {"loss": 2.0}, False)]


def test_pbt_changes_what_it_is_told_to_and_keeps_kinds() -> None:
    scheduler = PopulationBasedTraining(
        perturbation_interval=1,
        hyperparam_mutations={"lr": tune.uniform(0, 1), "n": [1, 2, 4], "size": [8]},
        custom_explore_fn=lambda config: {**config, "seen": True},
    )
    for seed in range(30):
        scheduler.bind("loss", "min", seed)
        trial = tune_trial(0)
        new = scheduler.explore(trial, {"train_loop_config": {"lr": 0.5, "n": 2, "keep": "x"}})
        inner = new["train_loop_config"]
        assert inner["keep"] == "x"
        assert inner["seen"]
        assert inner["n"] in (1, 2, 4)
        assert inner["size"] == 8
        assert inner["lr"] in (0.4, 0.6) or 0 <= inner["lr"] <= 1


def test_schedulers_know_the_seconds_of_a_trial_as_its_progress(study: StudyLog) -> None:
    rows = [(0, 4, 100.0, 1.0), (1, 3, 59.0, 3.0), (1, 4, 61.0, 3.0)]
    for trial, n, seconds, loss in rows:
        place = {"generation": 1, "index": n}
        line = {"e": "reported", "trial": trial, "n": n, "s": seconds, "metrics": {"loss": loss}}
        study.add({**line, **place})
    rule = MedianStoppingRule("time_total_s", "loss", "max", 60, min_samples_required=1)
    rule.bind("", "", 0)
    # Trial 0 has ended, and reported 2.0 last before that second.
    reason = rule.judge(study.study, study.study.trials[1]).reason
    assert reason == "not behind the median at 61"
    rule = MedianStoppingRule("time_total_s", "loss", "min", 60, min_samples_required=1)
    rule.bind("", "", 0)
    study.study.trials[1].reports[:] = study.study.trials[1].reports[-1:]
    reason = rule.judge(study.study, study.study.trials[1]).reason
    assert reason == "its best 3 is behind 2, the median of 1 at 61"


def tune_trial(number: int) -> Any:
    from elastic.core.study import Trial

    return Trial(number, f"trial_{number}")


def test_a_plateau_is_one_only_over_so_many_reports() -> None:
    stopper = TrialPlateauStopper("loss", std=0.01, num_results=3, grace_period=4)
    said = [stopper("a", {"loss": value}) for value in (1.0, 0.5, 0.5, 0.5, 0.5)]
    assert said == [False, False, False, True, True]


# ----------------------------------------------------------------------------- what reports count


def row(generation: int, index: int, **more: Any) -> dict[str, Any]:
    return {"generation": generation, "index": index, "metrics": {}, **more}


def test_reports_that_are_made_again_have_the_numbers_that_they_had() -> None:
    rows = [
        row(1, 0, checkpoint="a"), row(1, 1, checkpoint="b"), row(1, 2),
        row(2, 0, resumed_from="b"), row(2, 1),
        row(3, 0), row(3, 1),
    ]  # fmt: skip
    numbering = Numbering()
    assert [numbering.take(one) for one in rows] == [1, 2, 3, 3, 4, 1, 2]


def test_places_in_a_loop_tell_reports_apart_and_exploits_count_on() -> None:
    rows = [row(1, 0, at=[0, 0]), row(1, 1, at=[1, 0]), row(2, 0, at=[1, 0]), row(2, 1, at=[2, 0])]
    numbering = Numbering()
    assert [numbering.take(one) for one in rows] == [1, 2, 2, 3]
    taken = Numbering({"theirs": 5}, {"own": 5})
    assert [taken.take(row(1, n, resumed_from="theirs")) for n in range(2)] == [6, 7]


# --------------------------------------------------------------------------------------- results


@pytest.fixture
def study(tmp_path: Path) -> StudyLog:
    log = StudyLog(str(tmp_path / "mine"))
    settings = {"name": "mine", "metric": "loss", "mode": "min", "seed": 1, "total": 3}
    settings["trainable"] = "objective"
    log.add({"e": "study", "settings": settings})
    losses = [[3.0, 1.0, 2.0], [2.0, 1.5], ["nan"]]
    for trial, values in enumerate(losses):
        name = f"mine_{trial:05d}"
        log.add({"e": "proposed", "trial": trial, "name": name, "config": {"lr": trial}})
        log.add({"e": "started", "trial": trial, "job": f"j-{trial}", "run": name})
        for n, value in enumerate(values, start=1):
            metrics = {"loss": value}
            log.add(
                {
                    "e": "reported",
                    "trial": trial,
                    "n": n,
                    "metrics": metrics,
                    "generation": 1,
                    "index": n,
                }
            )
    log.add({"e": "ended", "trial": 0, "phase": "succeeded"})
    error = {
        "error_type": "ValueError",
        "message": "bad batch",
        "traceback": "tb",
        "worker": "n1/3",
    }
    log.add({"e": "ended", "trial": 2, "phase": "failed", "reason": "bad batch", "error": error})
    return log


def test_results_are_what_the_log_says(study: StudyLog) -> None:
    # Read anew, past a line that a kill has torn.
    path = study.files.path
    with Path(path, "study.jsonl").open("a") as file:
        file.write('{"e": "reported", "tri')
    grid = ResultGrid(StudyLog(path))
    assert len(grid) == 3
    best = grid.get_best_result()
    assert best.config == {"lr": 1}
    assert best.metrics is not None
    assert (best.metrics["loss"], best.metrics["training_iteration"]) == (1.5, 2)
    assert grid.get_best_result(scope="all").config == {"lr": 0}
    assert grid.get_best_result("loss", "max").config == {"lr": 0}
    assert (grid.num_errors, grid.num_terminated) == (1, 1)
    assert "trial mine_00002 failed: bad batch" in str(grid.errors[0])
    assert grid[2].error is not None
    frame = grid.get_dataframe()
    assert list(frame["config/lr"]) == [0, 1, 2]
    assert list(frame["state"]) == ["succeeded", "running", "failed"]
    assert list(grid.get_dataframe("loss", "min")["training_iteration"]) == [2, 2, 1]
    with pytest.raises(
        UsageError, match="no trial has reported a finite 'los'; they reported loss"
    ):
        grid.get_best_result("los", "min")


def test_an_analysis_has_rays_older_names(study: StudyLog) -> None:
    analysis = tune.ExperimentAnalysis(study.files.path)
    assert isinstance(analysis, ResultGrid)
    assert analysis.best_config == analysis.get_best_config("loss", "min") == {"lr": 1}
    assert analysis.get_best_config("loss", "min", "all") == {"lr": 0}
    assert analysis.best_trial is analysis.trials[1]
    assert analysis.best_result["loss"] == 1.5
    assert analysis.best_checkpoint is analysis.get_last_checkpoint() is None
    assert list(analysis.dataframe("loss", "min")["loss"])[:2] == [1.0, 1.5]
    assert list(analysis.results_df.index) == [trial.trial_id for trial in analysis.trials]
    assert analysis.get_best_trial("training_iteration", "max") is analysis.trials[0]
    other = tune.ExperimentAnalysis(study.files.path, default_mode="max")
    assert other.best_config == {"lr": 0}
    with pytest.raises(UsageError, match="no study is there"):
        tune.ExperimentAnalysis(f"{study.files.path}x")


def test_without_the_metric_an_analysis_has_no_best_trial_unless_it_has_one_only(
    study: StudyLog,
) -> None:
    analysis = tune.ExperimentAnalysis(study.files.path, default_metric="los")
    assert analysis.best_trial is analysis.best_config is None
    assert analysis.get_last_checkpoint(metric="los") is None
    with pytest.raises(UsageError, match="no trial has reported a finite 'los'"):
        _ = analysis.best_checkpoint
    del analysis._study.trials[1:]
    assert analysis.best_trial is analysis._study.trials[0]
    assert analysis.get_best_result().config == {"lr": 0}


def test_rays_callback_of_a_trainer_in_a_trial_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_call, "current", lambda: SimpleNamespace(show_group=dict))
    callback = TuneReportCallback()
    assert RunConfig(callbacks=[callback]).callbacks == (callback,)


def test_a_study_without_a_name_gets_one_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tune.RunConfig(storage_path=str(tmp_path))
    monkeypatch.setattr(tune.Tuner, "_own_name", lambda tuner: "print_1")
    paths = []
    for _ in range(3):
        paths.append(tune.Tuner(print, run_config=config)._new_path())
        StudyLog(paths[-1]).add({"e": "study", "settings": {"name": "print_1"}})
    assert [Path(path).name for path in paths] == ["print_1", "print_1-2", "print_1-3"]


def test_loggers_write_each_report_of_a_trial_once(study: StudyLog) -> None:
    trial = study.study.trials[1]
    run = Path(study.files.path, trial.attempt.run)
    rows = [row(1, n) | {"metrics": {"loss": loss}} for n, loss in enumerate((2.0, 1.5))]
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for kind in 2 * (JsonLoggerCallback, TBXLoggerCallback):  # Twice: the study goes on.
        callbacks = Callbacks([kind()])
        callbacks.call("setup", experiment_path=study.files.path)
        callbacks.call("on_trial_result", trials=[], trial=trial, result={})
        callbacks.call("on_trial_complete", trials=[], trial=trial)
    lines = (run / "tracked.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.0, 1.5]
    (events,) = (run / "tensorboard").iterdir()
    assert events.read_bytes().count(b"loss") == 2


def test_run_raises_for_failed_trials_and_names_what_it_does_not_take(
    study: StudyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuners: list[tune.Tuner] = []

    def fit(tuner: tune.Tuner) -> ResultGrid:
        tuners.append(tuner)
        return ResultGrid(study)

    monkeypatch.setattr(tune.Tuner, "fit", fit)
    keep = tune.CheckpointConfig(num_to_keep=2)
    given: Any = {"checkpoint_config": keep, "fail_fast": True, "resume": False}
    with pytest.raises(tune.TuneError, match=r"1 of 3 trials failed.*bad batch") as raised:
        tune.run(print, **given)
    assert isinstance(raised.value.result, tune.ExperimentAnalysis)
    assert tuners[0]._run_config.checkpoint_config == keep
    assert tuners[0]._run_config.failure_config.fail_fast is True
    own = RunConfig(
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=keep,
        stop={"loss": 1.0},
        log_to_file=True,
    )
    trainer = TorchTrainer(print, run_config=own)
    assert len(tune.run(trainer, name="n", raise_on_failed_trial=False)) == 3
    assert tuners[1]._run_config == replace(own, name="n")
    tune.run(trainer, max_failures=0, raise_on_failed_trial=False)
    assert tuners[2]._run_config == replace(own, failure_config=FailureConfig())
    with pytest.raises(UsageError, match=r"local_dir='/x'\).*: storage_path="):
        tune.run(print, local_dir="/x")
    with pytest.raises(UsageError, match="unknown argument: confg"):
        tune.run(print, confg={})


class PlayedCluster:
    """A client and a recipe in one: it takes all jobs, and tells nothing of them."""

    def __init__(self, slots: int = 1) -> None:
        self.submitted: list[str] = []
        self.slots = slots

    def trainer(self, run: str, config: Any, resume_from: str = "", size: str = "") -> Any:
        trainable = as_trainable(print)
        made = Recipe(trainable, RunConfig(), "/nowhere").trainer(run, config, resume_from, size)
        made.submit = lambda spec, *rest: self.submitted.append(spec.name)  # type: ignore
        return made

    def watch(self, job_id: str) -> Any:
        return (event for event in ())

    def stop(self, job_id: str, reason: str, *, now: bool = False) -> None:
        pass

    def status(self) -> Any:
        slots = Node("n1", incarnation=1, host="h", num_slots=self.slots)
        return SimpleNamespace(view=SimpleNamespace(nodes=[NodeView(slots, NodePhase.READY, 0, 1)]))


def test_a_node_that_trials_may_not_use_is_no_room_for_them() -> None:
    scaling = ScalingConfig(num_workers=2, accelerator_type="H100")
    spec = TorchTrainer(print, scaling_config=scaling).job_spec()
    cpus = Resources.of({"CPU": 8})
    nodes = [
        Node(NodeId(kind), 1, "h", num_slots=4, resources=cpus, accelerator_type=kind)
        for kind in ("H100", "L4")
    ]
    assert room_for(spec, [NodeView(node, NodePhase.READY, 0, 4) for node in nodes]) == 2


@pytest.mark.parametrize(("limit", "count"), [(0, 2), (1, 1)])
def test_one_trial_more_than_run_waits_in_the_queue(tmp_path: Path, limit: int, count: int) -> None:
    log = StudyLog(str(tmp_path / "mine"))
    log.add({"e": "study", "settings": {"name": "mine", "trainable": "t"}})
    tuner = tune.Tuner(
        print,
        tune_config=tune.TuneConfig(num_samples=5, max_concurrent_trials=limit, seed=1),
    )
    cluster = PlayedCluster()
    log.study.settings["seed"] = 1
    plan = tuner._plan(log, cluster)  # type: ignore[arg-type]
    controller = Controller(log, plan, cluster, SimpleNamespace(is_embedded=False, env={}))  # type: ignore[arg-type]
    controller._fill()
    assert cluster.submitted == [f"mine_{number:05d}" for number in range(count)]


def test_a_study_that_is_told_to_stop_continues_no_trial(study: StudyLog) -> None:
    two = json.dumps(asdict(ScalingConfig(num_workers=2)))
    for number in (3, 4):
        name = f"mine_{number:05d}"
        study.add({"e": "proposed", "trial": number, "name": name, "config": {}})
        study.add({"e": "started", "trial": number, "job": f"j-{number}", "run": name})
        study.add({"e": "decided", "trial": number, "what": "pause"})
        study.add({"e": "resized", "trial": number, "size": two})
    resume = Decision(tuning.GO_ON, "the best of its rung")
    scheduler: Any = SimpleNamespace(
        settle=lambda _: [(3, resume), (4, resume)],
        judge=lambda *_: pytest.fail("it judges a trial of a study that ends"),
    )
    cluster: Any = PlayedCluster()
    plan = Plan(
        recipe=cluster,
        search=BasicVariantGenerator(),
        scheduler=scheduler,
        stopper=as_stopper(None),
        callbacks=Callbacks(()),
        fail_fast=True,
        is_quiet=True,
    )
    controller = Controller(study, plan, cluster, SimpleNamespace(is_embedded=True, env={}))  # type: ignore[arg-type]
    controller._settle()  # The first has no room for two workers, which ends the study.
    assert [trial.state.value for trial in study.study.trials[3:]] == ["failed", "paused"]
    controller._take_report(study.study.trials[1], 3, row(1, 3) | {"metrics": {"loss": 1.0}}, 0)
    controller._settle()
    controller._fill()
    assert [trial.state.value for trial in study.study.trials[3:]] == ["failed", "stopped"]
    assert cluster.submitted == []


def asks_for_two(controller: Controller, trial: Any) -> None:
    """Tell the controller that the trial's job has ended, and asks for two workers."""
    two = json.dumps(asdict(ScalingConfig(num_workers=2)))
    spec, result = SimpleNamespace(job_id=trial.attempt.job_id), json.dumps({SIZE: two})
    record = SimpleNamespace(spec=spec, phase=JobPhase.SUCCEEDED, reason="", result=result)
    controller._take_end(trial, SimpleNamespace(record=record))  # type: ignore[arg-type]


def begun(folder: Path, cluster: PlayedCluster) -> tuple[StudyLog, Controller]:
    """Return a study whose two trials were submitted."""
    log = StudyLog(str(folder / "mine"))
    log.add({"e": "study", "settings": {"name": "mine", "trainable": "t", "seed": 1}})
    plan = tune.Tuner(print, tune_config=tune.TuneConfig(num_samples=2))._plan(log, cluster)  # type: ignore[arg-type]
    controller = Controller(log, plan, cluster, SimpleNamespace(is_embedded=False, env={}))  # type: ignore[arg-type]
    controller._fill()
    return log, controller


def test_the_path_of_a_reports_checkpoint_is_a_metric_unless_the_script_has_one(
    tmp_path: Path,
) -> None:
    log, controller = begun(tmp_path, PlayedCluster(slots=4))
    trial = log.study.trials[1]
    own = {"metrics": {"checkpoint_path": "/own"}}
    for n, more in enumerate(({}, {"checkpoint": "c1"}, {"checkpoint": "c2", **own})):
        controller._take_report(trial, n + 1, row(1, n) | more, 0)
    paths = [report.metrics.get("checkpoint_path") for report in trial.reports]
    assert paths == [None, f"{tmp_path}/mine/mine_00001/checkpoints/c1", "/own"]


def test_a_trial_that_asks_for_another_size_waits_for_its_turn_and_ends_with_the_study(
    tmp_path: Path,
) -> None:
    cluster = PlayedCluster(slots=4)
    log, controller = begun(tmp_path, cluster)
    first, second = log.study.trials
    for _ in range(SIZES_MAX):
        asks_for_two(controller, first)
        assert (first.state, first.number in controller._following) == (TrialState.PENDING, False)
        controller._fill()
    # In its own run directory, whose checkpoints it continues from.
    assert cluster.submitted == ["mine_00000", "mine_00001", *["mine_00000"] * SIZES_MAX]
    assert (len(first.attempts), from_json(first.attempt.size).num_workers) == (1, 2)
    asks_for_two(controller, first)
    assert (first.state, first.reason[:22]) == (TrialState.FAILED, "its trainers have aske")
    asks_for_two(controller, second)
    controller._count_room()
    assert controller._room == 4  # No less for a size that may never be placed.
    controller._stop_all("enough")
    controller._fill()
    assert (second.state, second.reason) == (TrialState.STOPPED, "enough")
    assert controller._is_done()


def test_later_trials_begin_with_a_size_once_a_trial_has_reported_with_it(study: StudyLog) -> None:
    trial = study.study.trials[1]
    study.add({"e": "resized", "trial": 1, "size": "16"})
    study.add({"e": "started", "trial": 1, "job": "j-7", "run": trial.name, "size": "16"})
    assert (trial.attempt.size, study.study.size) == ("16", "")  # There may never be room for it.
    line = {"e": "reported", "trial": 1, "n": 3, "metrics": {}, "generation": 1, "index": 0}
    study.add(line)
    assert study.study.size == "16"
    # A driver on another cluster asks anew, also for a trial that has failed by what it asked.
    study.add({"e": "ended", "trial": 1, "phase": "failed", "error": {"message": "no room"}})
    study.add({"e": "left", "trial": 1, "anew": False}, {"e": "opened"})
    assert (trial.attempt.size, trial.sizes, study.study.size) == ("", 0, "")


def test_what_a_function_does_with_a_refused_size_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[Any] = []

    def take(text: str, *_: Any, **__: Any) -> None:
        reported.append(json.loads(text))

    worker = SimpleNamespace(join=None, report=take, show_group=dict)
    monkeypatch.setattr(train_call, "current", lambda: worker)

    def fits(config: Any) -> float:
        try:
            check_trial(ScalingConfig(num_workers=config["workers"]))
        except BaseException:
            tune.report({"loss": math.inf})
            train.report({"seconds": 1.0})
        return 0.5

    def asked(workers: int, known: ScalingConfig) -> ScalingConfig | None:
        result = json.dumps(Objective(fits, scaling=known)({"workers": workers}))
        return from_json(size) if (size := size_asked_by(result)) else None

    assert asked(3, ScalingConfig()) == ScalingConfig(num_workers=3)
    assert reported == []
    assert asked(1, ScalingConfig()) is asked(0, ScalingConfig()) is None
    assert reported == [{"_metric": 0.5}] * 2
    assert asked(0, ScalingConfig(num_workers=3)) == ScalingConfig()


def test_a_trials_lost_worker_is_shown_and_one_that_ends_by_order_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = StudyLog(str(tmp_path / "mine"))
    log.add({"e": "study", "settings": {"name": "mine", "trainable": "t", "seed": 1}})
    cluster = PlayedCluster()
    plan = tune.Tuner(print)._plan(log, cluster)  # type: ignore[arg-type]
    controller = Controller(log, plan, cluster, SimpleNamespace(is_embedded=False, env={}))  # type: ignore[arg-type]
    controller._fill()
    job_id = log.study.trials[0].attempt.job_id
    for cause in ("was killed by SIGKILL", "stopped by its coordinator"):
        fields = (("worker", "n1/0"), ("cause", cause))
        controller._events.put((0, job_id, TimedNote(Note("worker_gone", job_id, fields), 0)))
    controller._receive()
    shown = [line for line in capsys.readouterr().err.splitlines() if "worker" in line]
    assert shown == ["trial mine_00000: worker n1/0 was killed by SIGKILL"]


def test_the_seconds_of_a_trial_count_from_when_its_first_job_began(study: StudyLog) -> None:
    trial = study.study.trials[1]
    study.add({"e": "started", "trial": 1, "job": "j-7", "run": trial.name, "unix_ns": 5})
    assert (trial.started_unix_ns, trial.has_begun) == (5, False)
    for moment in (9, 20):
        study.add({"e": "began", "trial": 1, "unix_ns": moment})
    assert (trial.started_unix_ns, trial.has_begun) == (9, True)


def test_trials_have_what_callbacks_of_ray_read(study: StudyLog) -> None:
    trials = study.study.trials
    assert [trial.status for trial in trials] == ["TERMINATED", "RUNNING", "ERROR"]
    assert trials[1].last_result == {
        "loss": 1.5, "training_iteration": 2, "trial_id": "mine_00001", "time_total_s": 0.0,
    }  # fmt: skip
    assert math.isnan(trials[2].last_result["loss"])
    assert tune_trial(0).last_result == {}


def test_a_trials_name_may_be_made_of_its_trainables(study: StudyLog) -> None:
    def creator(trial: Any) -> str:
        return f"{trial.trainable_name}_{trial.trial_id}_{trial.config['lr']}"

    search = BasicVariantGenerator()
    search.set_space({"lr": 5}, "loss", "min", 0)
    parts: Any = {"search": search, "label": creator, "is_quiet": True}
    plan = Plan(recipe=None, scheduler=None, stopper=None, callbacks=None, **parts)  # type: ignore[arg-type]
    controller = Controller(study, plan, client=None, cluster=None)  # type: ignore[arg-type]
    trial = controller._propose()
    assert trial is not None
    assert trial.label == "objective_mine_00003_5"
    assert trial.trainable_name == "objective"


@pytest.mark.parametrize("phase", [JobPhase.STOPPED, JobPhase.FAILED])
def test_a_trial_that_is_stopped_and_fails_all_the_same_has_failed(
    study: StudyLog, phase: JobPhase
) -> None:
    settings: Any = {"search": BasicVariantGenerator(), "is_quiet": True}
    plan = Plan(recipe=None, scheduler=None, stopper=None, callbacks=Callbacks(()), **settings)  # type: ignore[arg-type]
    controller = Controller(study, plan, client=None, cluster=None)  # type: ignore[arg-type]
    study.add({"e": "decided", "trial": 1, "n": 2, "what": "stop", "reason": "last rung"})
    failure = Failure("ValueError", "no disk") if phase is JobPhase.FAILED else None
    record = SimpleNamespace(
        spec=SimpleNamespace(job_id="j-1"), phase=phase, reason="no disk", failure=failure,
        failed_worker="n1/3",
    )  # fmt: skip
    controller._take_end(study.study.trials[1], SimpleNamespace(record=record))  # type: ignore[arg-type]
    trial = study.study.trials[1]
    assert trial.state.value == phase.value
    assert trial.reason == ("last rung" if phase is JobPhase.STOPPED else "no disk")


def test_optuna_plots_what_was_tried(study: StudyLog) -> None:
    theirs = ResultGrid(study).as_optuna_study()
    assert [trial.params["lr"] for trial in theirs.trials] == [0, 1, 2]
    assert theirs.best_value == 2.0
    assert theirs.trials[0].intermediate_values == {1: 3.0, 2: 1.0, 3: 2.0}


def test_the_commands_read_the_log(study: StudyLog) -> None:
    path = study.files.path
    said = CliRunner().invoke(main, ["tune", "status", path])
    assert said.exit_code == 0, said.output
    assert "mine_00001" in said.output
    assert "1 running, 1 succeeded, 1 failed, of 3; best mine_00001 loss=1.5 (lr=1)" in said.output
    said = CliRunner().invoke(main, ["tune", "best", path])
    assert "mine_00001  loss=1.5  after 2 reports" in said.output
    said = CliRunner().invoke(main, ["tune", "status", f"{path}x"])
    assert said.exit_code == 78
    assert "no study is in" in said.output


def test_a_trial_that_takes_over_a_checkpoint_is_to_be_started_until_it_was(
    study: StudyLog,
) -> None:
    donor, run = {"checkpoint": "c7", "from": "taken/mine_00001-2/c7"}, "mine_00001-2"
    line = {"e": "decided", "trial": 1, "n": 2, "what": "exploit", "run": run, **donor}
    study.add({**line, "config": {"lr": 9}, "reason": "worst", "rungs": {"2": -1.5}})
    # A driver that was killed here knows from where to go on, with which config.
    driver = StudyLog(study.files.path).study
    trial = driver.trials[1]
    assert (trial.state.value, trial.config, trial.rungs) == ("pending", {"lr": 9}, {2: -1.5})
    assert trial.attempt == TrialAttempt("", run, {"c7": 2}, "taken/mine_00001-2/c7")
    assert trial.attempts[0].job_id == "j-1"
    assert driver.proposals[1] == LoggedConfig({"lr": 1})
    study.add({"e": "started", "trial": 1, "job": "j-9", "run": run, "begins": {"c7": 2}})
    assert [one.job_id for one in study.study.trials[1].attempts] == ["j-1", "j-9"]


def test_a_wish_to_stop_is_taken_once(study: StudyLog) -> None:
    study.ask_to_stop("enough")
    driver = StudyLog(study.files.path)
    assert driver.take_stop() == "enough"
    assert driver.take_stop() == ""
