"""What a spec names of the hub: one commit for a whole run, downloaded once, then the same as a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.states import Failed
from typer.testing import CliRunner

from flows.cli import app
from infra.artifacts import open_store
from infra.hub.sources import HubError, HubUnavailable
from infra.settings import Settings
from infra.storage.filesystem import StoreReadOnly
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from ppo_core.spec.hub import HubCommit, exact_name
from tasks.policies.held_out import absolute
from tasks.runs.fork import fork_run
from tasks.runs.run_state import spec_of_run
from tasks.stages.download_source import download_ahead, download_sources
from tasks.stages.hub_names import DOWNLOAD, bring, download_key, hub_sources, with_commits
from tasks.stages.source_upload import upload_source
from tasks.stages.stage import may_help_again
from tests.hub_server import ToyHub, toy_hub
from tests.tasks.run_contexts import ARITHMETIC, run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, flip_a_bit, killed

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"t",
    "model.safetensors": b"weights",
    "model.json": b"toy",
}
ROW = b'{"prompt": "1+1=", "answer": "2"}\n'
NAMED = ("model.path=hf://us/small", "model.config=null", "model.tokenizer=null", "sft=null")
DATA = ("dataset.train=hf://us/rows:train.jsonl", "dataset.evaluation=hf://us/rows:test.jsonl")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ToyHub]:
    """A hub with a model and data, which the settings name."""
    with toy_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PPOFLOW_STORE"):
            monkeypatch.delenv(name, raising=False)
        server.model("us/small", MODEL)
        server.dataset("us/rows", {"train.jsonl": ROW * 50, "test.jsonl": ROW})
        yield server


def main(hub: ToyHub, name: str = "us/small") -> str:
    """The last commit."""
    return list({**hub.models, **hub.datasets}[name].commits)[-1]


def test_names_become_the_commits_of_today_and_stay_them(hub: ToyHub) -> None:
    spec = smoke_spec(*NAMED, *DATA)
    assert with_commits(smoke_spec()) == smoke_spec()
    first = with_commits(spec)
    assert {one.name: one.commit for one in first.hub_commits} == {
        "hf://us/small": main(hub),
        "hf://us/rows:train.jsonl": main(hub, "us/rows"),
        "hf://us/rows:test.jsonl": main(hub, "us/rows"),
    }
    hub.model("us/small", {**MODEL, "model.safetensors": b"other"})
    hub.asked.clear()
    assert with_commits(first) == first
    assert with_commits(spec, first.hub_commits) == first
    assert RunSpec.model_validate(first.model_dump(mode="json")) == first
    assert hub.asked == []
    assert with_commits(spec).hub_commits != first.hub_commits
    exact = spec.with_overrides(
        [f"model.path={exact_name(first.hub_commits[0])}", "dataset.train=x", "dataset.evaluation=y"]
    )
    hub.asked.clear()
    assert [one.commit for one in with_commits(exact).hub_commits] == [first.hub_commits[0].commit]
    assert hub.asked == []


def test_the_commits_of_other_names_are_dropped_and_one_name_is_of_one_kind(hub: ToyHub) -> None:
    other = HubCommit(name="hf://us/gone", commit="0" * 40)
    assert with_commits(smoke_spec(), [other]) == smoke_spec()
    with pytest.raises(InputError, match="hf://us/small is used as data and as a model"):
        hub_sources(smoke_spec(*NAMED, "dataset.train=hf://us/small"))


def test_the_key_is_of_the_commit_and_of_what_is_taken(hub: ToyHub, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = with_commits(smoke_spec(*NAMED))
    with pytest.raises(InputError, match="hf://us/small stands for no commit yet"):
        download_key(hub_sources(smoke_spec(*NAMED))["hf://us/small"])
    tokenizer = with_commits(smoke_spec("model.tokenizer=hf://us/small"))
    keys = [download_key(hub_sources(one)["hf://us/small"]) for one in (spec, tokenizer)]
    monkeypatch.setenv("PPOFLOW_TRUST_REMOTE_CODE", "1")
    keys.append(download_key(hub_sources(spec)["hf://us/small"]))
    hub.model("us/small", {**MODEL, "more.json": b"{}"})
    keys.append(download_key(hub_sources(with_commits(smoke_spec(*NAMED)))["hf://us/small"]))
    assert len(set(keys)) == 4


@pytest.mark.usefixtures("prefect_server")
def test_a_name_is_downloaded_once_and_counts_as_a_folder_of_the_same_files(hub: ToyHub, tmp_path: Path) -> None:
    spec = with_commits(smoke_spec(*NAMED, *DATA))
    context = run_context(spec, tmp_path / "home", engines=ToyEngines())
    with pytest.raises(InputError, match=r"hf://us/small is not in the store .*: give the run's command again"):
        context.tokenizer()
    hub.failures = [503]
    refs = download_sources(context)
    assert [(ref.name, ref.commit) for ref in refs] == [(one.name, one.commit) for one in spec.hub_commits]
    assert refs[0].in_words() == f"hf://us/small is us/small at commit {main(hub)}, 0.0 MiB"
    assert sorted(hub.downloaded()) == sorted([*MODEL, "test.jsonl", "train.jsonl"])
    assert not list((tmp_path / "home" / "runs").rglob("*.safetensors"))

    for name, content in MODEL.items():
        (tmp_path / "local").mkdir(exist_ok=True)
        (tmp_path / "local" / name).write_bytes(content)
    (tmp_path / "train.jsonl").write_bytes(ROW * 50)
    (tmp_path / "test.jsonl").write_bytes(ROW)
    local = smoke_spec(f"model.path={tmp_path}/local", *NAMED[1:])
    data = [f"dataset.train={tmp_path}/train.jsonl", f"dataset.evaluation={tmp_path}/test.jsonl"]
    folders = context.with_spec(local.with_overrides(data))
    assert context.model_inputs()["model"].digest == folders.model_inputs()["model"].digest
    digests = {name: given.digest for name, given in context.hub_inputs(*spec.data).items()}
    folders.sources(*folders.spec.data)
    assert list(digests.values()) == [folders.source_digests[name] for name in folders.spec.data]

    hub.asked.clear()
    again = run_context(spec, tmp_path / "home", "another", engines=ToyEngines())
    assert download_sources(again) == refs
    assert again.model_inputs() == context.model_inputs()
    assert hub.asked == []
    shipped = upload_source(context, context.model_inputs()["model"])
    assert (shipped.ref, shipped.digest) == (refs[0].bare(), context.model_inputs()["model"].digest)


@pytest.mark.usefixtures("prefect_server")
def test_a_run_keeps_its_commit_its_records_name_it_and_damage_is_mended(hub: ToyHub, tmp_path: Path) -> None:
    run = ToyRun(tmp_path / "home", (*NAMED, *DATA, "iterations=3"))
    run.engines.before("generate_rollouts", 2, killed)
    run.train_until_killed()
    (record, *_) = run.records()
    first = main(hub)
    assert [ref.commit for ref in record.downloads] == [first, main(hub, "us/rows"), main(hub, "us/rows")]
    hub.model("us/small", {**MODEL, "model.safetensors": b"other"})
    flip_a_bit(run.place(record.downloads[0]))
    hub.asked.clear()
    records = run.train()
    assert set(hub.downloaded()) == set(MODEL)
    assert {ref.commit for one in records for ref in one.downloads if ref.repository == "us/small"} == {first}
    needed = run.needs(run.context()).of_all()
    assert {(ref.kind, ref.key) for ref in record.downloads} <= needed
    fork_run(run.name, 2, "new", [])
    assert spec_of_run("new").hub_commits == spec_of_run(run.name).hub_commits
    with pytest.raises(InputError, match=r"model.path: 'hf://us/small' -> 'hf://us/small@v2'"):
        run.context("model.path=hf://us/small@v2")


@pytest.mark.usefixtures("prefect_server")
def test_what_a_critic_begins_as_is_of_a_commit_too(hub: ToyHub, tmp_path: Path) -> None:
    hub.model("us/scores", {**MODEL, "model.safetensors": b"scores"})
    run = ToyRun(tmp_path / "home", ("model.critic=hf://us/scores", "iterations=1"))
    (record, *_) = run.train()
    assert [(ref.repository, ref.commit) for ref in record.downloads] == [("us/scores", main(hub, "us/scores"))]
    model = absolute(run.context().spec.model, tmp_path, run.context().spec.hub_commits)
    assert model.critic == f"hf://us/scores@{main(hub, 'us/scores')}"


def test_what_was_brought_ahead_serves_where_there_is_no_network(
    hub: ToyHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    spec = with_commits(smoke_spec(*NAMED))
    download_ahead(smoke_spec(*NAMED), said.append)
    assert said == [f"hf://us/small is us/small at commit {main(hub)}, 0.0 MiB"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert run_context(spec, tmp_path / "home", engines=ToyEngines()).tokenizer().path.is_dir()
    said_so = (
        r"^the commit of hf://us/small must be looked up, and HF_HUB_OFFLINE forbids it: write .* hf://us/small@COMMIT,"
    )
    with pytest.raises(HubError, match=said_so):
        with_commits(smoke_spec(*NAMED))
    exact = with_commits(smoke_spec(f"model.path=hf://us/small@{main(hub)}", *NAMED[1:]))
    assert run_context(exact, tmp_path / "home", "exact", engines=ToyEngines()).tokenizer().path.is_dir()
    assert hub.asked == []


def test_a_reward_model_that_is_given_is_brought_ahead_with_the_rest_of_its_pipeline(hub: ToyHub) -> None:
    hub.model("us/judge", {**MODEL, "model.safetensors": b"scores"})
    pipeline = ARITHMETIC.parent / "helpful" / "rlhf.yaml"
    given = ("given.reward_model=hf://us/judge", "run.model.critic=<reward_model>")
    asked = [option for one in (*given, *(f"run.{name}" for name in NAMED)) for option in ("--set", one)]
    result = CliRunner().invoke(app, ["download", str(pipeline), *asked])
    assert result.stdout.splitlines() == [
        f"hf://us/{name} is us/{name} at commit {main(hub, f'us/{name}')}, 0.0 MiB" for name in ("small", "judge")
    ]
    assert sorted(hub.downloaded()) == sorted([*MODEL, *MODEL])
    told = CliRunner().invoke(app, ["download", str(pipeline)]).stdout
    assert told == f"{pipeline} names nothing of the Hugging Face Hub (hf://…)\n"


@pytest.mark.parametrize("name", ["hf://us/small", "hf://us/rows:train.jsonl"])
def test_what_the_store_did_not_take_is_not_fetched_again(hub: ToyHub, tmp_path: Path, name: str) -> None:
    spec = with_commits(smoke_spec(*NAMED, *DATA))
    store, source, folder = open_store(Settings().store_root), hub_sources(spec)[name], tmp_path / "partly"
    in_its_way = Path(store.root) / DOWNLOAD
    in_its_way.parent.mkdir(parents=True)
    in_its_way.touch()
    with pytest.raises(StoreReadOnly):
        bring(store, source, folder, lambda done, size: None)
    in_its_way.unlink()
    assert hub.downloaded()
    assert not list((Path(store.root) / "scratch").iterdir())
    hub.asked.clear()
    store = open_store(store.root)
    ref = bring(store, source, folder, lambda done, size: None)
    assert hub.downloaded() == []
    assert len(store.manifest(ref).files) == (len(MODEL) if name == "hf://us/small" else 1)
    assert not folder.exists()


def test_a_download_ahead_that_is_damaged_comes_again(hub: ToyHub) -> None:
    said: list[str] = []
    download_ahead(smoke_spec(*NAMED), said.append)
    (source,) = hub_sources(with_commits(smoke_spec(*NAMED))).values()
    flip_a_bit(Path(Settings().store_root) / DOWNLOAD / download_key(source))
    hub.asked.clear()
    download_ahead(smoke_spec(*NAMED), said.append)
    assert sorted(hub.downloaded()) == sorted(MODEL)
    assert [said[0] in said[2], "set aside at " in said[1], len(said)] == [True, True, 3]


@pytest.mark.parametrize(("error", "again"), [(HubError("no"), False), (HubUnavailable("not now"), True)])
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool) -> None:
    assert may_help_again(None, None, Failed(data=error)) == again
