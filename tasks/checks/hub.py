"""What a spec names of the hub, before a run starts: where it is in the store, or whether it can be had."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from infra.artifacts import ArtifactCorrupted, ArtifactStore
from infra.engines.protocol import EngineInput
from infra.hub.client import Hub
from infra.hub.sources import HubSource, chosen
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec.flow_spec import FlowSpec
from tasks.checks.model_folder import check_model_folder, require_model
from tasks.stages.hub_names import Downloads, hub_sources

CONFIG = "config.json"


def find_sources(spec: FlowSpec, store: ArtifactStore) -> tuple[dict[str, EngineInput], list[str], list[str]]:
    """Where the names lie that are in the store; notes; and of each other one, in words, what is to be downloaded.

    Of those only lists of files and config.json are read. Raises InputError, HubError or HubUnavailable for a name that
    is of no use.
    """
    downloads, found = Downloads(store), dict[str, EngineInput]()
    notes, missing = list[str](), list[str]()
    for name, source in hub_sources(spec).items():
        there = None
        with suppress(ArtifactCorrupted):  # the run downloads it anew
            there = downloads.of(source)
        if there is not None:
            found[name] = there
            notes += _check_model(source, there.path)
        else:
            missing.append(_look_up(source, notes))
    return found, notes, missing


def _look_up(source: HubSource, notes: list[str]) -> str:
    hub, settings = Hub(Settings()), Settings()
    _, files = hub.look_up(source)
    wanted = chosen(source, files)
    if source.kind == "model":
        with TemporaryDirectory(prefix="ppoflow-hub-") as place:
            folder = Path(place)
            for name in files:
                if PurePosixPath(name).name == name:
                    (folder / name).touch()
            if CONFIG in files:
                (folder / CONFIG).unlink()
                hub.read(source, CONFIG, folder)
            try:
                told = check_model_folder(folder, trust_remote_code=settings.trust_remote_code)
                notes += [note.replace(str(folder), source.name) for note in told]
                require_model(folder, "a spec's path", "model")
            except InputError as error:
                raise InputError(str(error).replace(str(folder), source.name)) from None
    elif not wanted:
        raise InputError(f"{source.name} has no tokenizer files: name the model's own repository in model.tokenizer")
    else:
        hub.require_readable(source, next(iter(wanted)))
    size = sum(file.size for file in wanted.values()) / 2**20
    return f"{source.name}: {len(wanted)} files of commit {source.revision}, {size:.1f} MiB"


def _check_model(source: HubSource, folder: Path) -> list[str]:
    trusted = Settings().trust_remote_code
    return check_model_folder(folder, trust_remote_code=trusted) if source.kind == "model" else []
