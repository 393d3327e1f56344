from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config import Config
from hpc_rl.config_load import config_table, dump_config, load_config
from hpc_rl.config_schema import LEAVES
from hpc_rl.config_yaml import dump_yaml, parse_yaml
from tests.config.refusal import refused


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write_config(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_config


def test_values_of_file_and_overrides(write) -> None:  # type: ignore[no-untyped-def]
    path = write(
        "steps: 7\nactor:\n  lr: 1e-6\nreshard: {verify: off}\nmodel:\n  config: {rms_norm_eps: 1e-5}\nparallel:\n"
    )
    config = load_config(path, ["parallel.tp=2", "seed=5", "resume=auto", "steps=9", "data.prompts=[a.jsonl, b.jsonl]"])
    assert (config.steps, config.seed, config.resume, config.parallel.tp) == (9, 5, "auto", 2)
    assert config.actor.lr == 1e-6
    assert config.reshard.verify == "off", "YAML 1.1 would read `off` as false"
    assert config.model.config == {"rms_norm_eps": 1e-5}, "YAML 1.1 would read 1e-5 as a string"
    assert config.data.prompts == ["a.jsonl", "b.jsonl"]
    assert config.rollout == Config().rollout


def test_empty_file_is_all_defaults(write) -> None:  # type: ignore[no-untyped-def]
    assert load_config(write("")) == Config()


def test_override_of_part_of_a_mapping_keeps_the_rest(write) -> None:  # type: ignore[no-untyped-def]
    path = write("model: {config: {hidden_size: 8, layers: 2}}\nreward: {kwargs: {a: 1}}\nparallel: {tp: 2}\n")
    config = load_config(path, ["model.config.hidden_size=16", "reward.kwargs.b.c=2", "parallel={pp: 3}"])
    assert config.model.config == {"hidden_size": 16, "layers": 2}
    assert config.reward.kwargs == {"a": 1, "b": {"c": 2}}
    assert (config.parallel.tp, config.parallel.pp) == (2, 3)


def test_override_of_text_that_looks_like_a_number(write) -> None:  # type: ignore[no-untyped-def]
    config = load_config(write(""), ["run.dir=2024", "resume=007", "reward.function=1e3", "data.prompts=12"])
    assert (config.run.dir, config.resume, config.reward.function) == ("2024", "007", "1e3")
    assert config.data.prompts == "12"


@pytest.mark.parametrize(
    ("override", "value", "rule", "fix"),
    [
        ("tp=2", "tp = 2", "there is no key tp", "did you mean parallel.tp or rollout.tp?"),
        ("lr=1", "lr = 1", "no key", "actor.lr or critic.lr"),
        ("algorithm.gama=1", "algorithm.gama = 1", "no key", "algorithm.gamma"),
        ("paralel.tp=2", "paralel", "no key", "parallel.tp"),
        ("optimizer.lr=2", "optimizer", "no key", "actor.lr"),
        ("parallel.zzz=2", "parallel.zzz = 2", "no key", "parallel has tp, pp, cp, ep"),
        ("zzz=2", "zzz = 2", "no key", "the sections are run, model"),
        ("steps.x=2", "steps.x=2", "no keys below it", "set steps itself"),
        ("parallel=2", "parallel = 2", "is a section", "tp, pp"),
        ("steps=x", "steps = 'x'", "(str): must be integer", "default is 100"),
        ("steps='3'", "steps = '3'", "(str): must be integer", "default is 100"),
        ("steps=true", "steps = true", "(bool): must be integer", "default is 100"),
        ("steps=2.5", "steps = 2.5", "(float): must be integer", "default is 100"),
        ("steps=", "steps = null", "(null): must be integer", "default is 100"),
        ("metrics.progress=yes", "metrics.progress = 'yes'", "must be true or false", "default is true"),
        ("rollout.stop=a", "rollout.stop = 'a'", "must be list of strings", "default is []"),
        ("data.prompts=[1]", "data.prompts = [1]", "string or list of strings or null", "default is null"),
        ("reward.kwargs=3", "reward.kwargs = 3", "must be mapping", "default is {}"),
        ("parallel.tp=0", "parallel.tp = 0", "out of range: it must be greater than or equal to 1", "default is 1"),
        ("seed=-1", "seed = -1", "out of range", "default is 0"),
        ("rollout.top_p=1.5", "rollout.top_p = 1.5", "less than or equal to 1", "default is 1.0"),
        ("actor.lr=.inf", "actor.lr = inf", "finite", "default is 1.0e-06"),
        ("algorithm.entropy_coef=.nan", "algorithm.entropy_coef = nan", "finite", "default is 0.0"),
        ("data.overlong=dorp", "data.overlong = 'dorp'", "must be one of drop, cut", "did you mean drop?"),
        ("rollout.sleep_level=5", "rollout.sleep_level = 5", "must be one of 0, 1, 2", "default is 2"),
        ("steps", "'steps'", "must be section.key=value", "steps=10"),
        ("=3", "'=3'", "must be section.key=value", "steps=10"),
        ("steps=[", "'steps=['", "not valid YAML", "correct"),
        ("run.dir=$HPC_RL_NOT_SET/x", "$HPC_RL_NOT_SET/x", "HPC_RL_NOT_SET is not set", "export it"),
    ],
)
def test_bad_override(write, override: str, value: str, rule: str, fix: str) -> None:  # type: ignore[no-untyped-def]
    with refused(value, rule, fix):
        load_config(write(""), [override])


@pytest.mark.parametrize(
    ("text", "value", "rule", "fix"),
    [
        ("steps: 1\nparallel:\n  tp: [2\n", "line 4", "not valid YAML", "correct that line"),
        ("steps: 1\nseed: 1\nsteps: 2\n", "line 3", "'steps' was given on line 1 already", "correct that line"),
        ("- a\n", "['a']", "must be a mapping", "steps: 100"),
        ("run: {dir: 2024}", "run.dir = 2024", "must be string", "put it in quotes"),
        ("parallel: 3", "parallel = 3", "is a section", "tp, pp"),
        ("parallel: {tpp: 3}", "parallel.tpp = 3", "no key", "parallel.tp"),
        ("1: 2", "1 = 2", "no key", "sections are"),
        ("steps: x", "run.yaml: steps = 'x'", "must be integer", "default is 100"),
    ],
)
def test_bad_file(write, text: str, value: str, rule: str, fix: str) -> None:  # type: ignore[no-untyped-def]
    with refused(value, rule, fix):
        load_config(write(text))


def test_missing_directory_and_binary_file(tmp_path: Path) -> None:
    with refused(str(tmp_path / "no.yaml"), "no such file", "give the path"):
        load_config(tmp_path / "no.yaml")
    with refused(str(tmp_path), "cannot be read", "give the path"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("steps: 3 # \xe9".encode("latin-1"))
    with refused("byte 11", "not UTF-8", "save the file as UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_paths_of_inputs_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, elsewhere = tmp_path / "repo", tmp_path / "elsewhere"
    (repo / "configs").mkdir(parents=True)
    elsewhere.mkdir()
    (repo / "setup.py").touch()
    (repo / "tiny").mkdir()
    (repo / "configs" / "p.jsonl").touch()
    (tmp_path / "above.jsonl").touch()
    config_path = repo / "configs" / "run.yaml"
    config_path.write_text(
        "model: {path: tiny}\ndata: {prompts: [p.jsonl, above.jsonl, none.jsonl]}\nrun: {dir: tiny}\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(config_path)
    assert config.model.path == str(repo / "tiny")
    assert config.data.prompts == [str(repo / "configs" / "p.jsonl"), "above.jsonl", "none.jsonl"], "not above the root"
    assert config.run.dir == "tiny", "an output is never looked for"
    assert load_config(config_path, ["model.path=tiny"]).model.path == "tiny", "an override means the current directory"
    (elsewhere / "tiny").mkdir()
    assert load_config(config_path).model.path == "tiny", "the current directory comes first"


def test_home_and_variables_are_expanded(write, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SCRATCH_DIR", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write("run: {dir: $SCRATCH_DIR/run}"), ["model.path=~/model", "reward.function=a:$b"])
    assert (config.run.dir, config.model.path) == ("/scratch/me/run", "/home/me/model")
    assert config.reward.function == "a:$b"


def test_dump_reads_back_equal(write) -> None:  # type: ignore[no-untyped-def]
    overrides = [
        "model.config={a: 'off', b: '1e3', c: [1.5, null], d: 'null', e: ''}",
        "resume='1'",
        'rollout.stop=["\\n"]',
    ]
    config = load_config(write("steps: 3\nactor: {lr: 3e-7}"), overrides)
    assert config.model.config == {"a": "off", "b": "1e3", "c": [1.5, None], "d": "null", "e": ""}
    assert load_config(write(dump_config(config))) == config


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_yaml_round_trip(value: object) -> None:
    assert parse_yaml(dump_yaml(value), "test") == value


def test_table_has_every_leaf_once() -> None:
    lines = config_table().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(LEAVES)
    assert "| `parallel.tp` | integer | `1` | tensor-parallel size of training |" in lines
    assert all(line.count("|") - line.count("\\|") == 5 for line in lines)


def test_table_command() -> None:
    command = [sys.executable, "-m", "hpc_rl.config_load"]
    shown = subprocess.run([*command, "--table"], capture_output=True, text=True, check=True)
    assert shown.stdout == config_table()
    assert subprocess.run(command, capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("grpo", {"kl_placement": "loss", "kl_estimator": "k3", "aggregation": "seq-mean-token-mean"}),
        ("dapo", {"kl_placement": "none", "clip_low": 0.2, "clip_high": 0.28, "refill_rounds": 4}),
        ("gspo", {"kl_placement": "none", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
        ("dpo", {"kl_placement": "none"}),
    ],
)
def test_an_algorithm_brings_its_published_values(write, name: str, published: dict) -> None:  # type: ignore[no-untyped-def]
    by_file = load_config(write(f"algorithm: {{name: {name}}}\n")).algorithm
    by_override = load_config(write("steps: 3\n"), [f"algorithm.name={name}"]).algorithm
    assert by_file == by_override
    assert {key: getattr(by_file, key) for key in published} == published
    assert by_file.lam == Config().algorithm.lam, "others keep their defaults"


def test_explicit_values_win_over_published_ones(write) -> None:  # type: ignore[no-untyped-def]
    path = write("algorithm: {clip_high: 0.3, aggregation: seq-mean-token-sum}\n")
    algorithm = load_config(path, ["algorithm.name=dapo", "algorithm.refill_rounds=0"]).algorithm
    assert (algorithm.clip_high, algorithm.refill_rounds, algorithm.kl_placement) == (0.3, 0, "none")
    assert algorithm.aggregation == "seq-mean-token-sum"
    again = load_config(write(dump_config(load_config(path, ["algorithm.name=dapo"])))).algorithm
    assert again == load_config(path, ["algorithm.name=dapo"]).algorithm


def test_unknown_algorithm_is_refused_with_the_nearest(write) -> None:  # type: ignore[no-untyped-def]
    with refused("algorithm.name = gropo", "", "did you mean grpo"):
        load_config(write(""), ["algorithm.name=gropo"])
