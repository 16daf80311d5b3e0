"""The hub, or a server that speaks as it does: which commit a name is, its files, and how they come here.

What is wrong with a name, a token or a repository is a `HubError`, which stays; `HubUnavailable` may pass.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

from infra.artifacts.fingerprint import file_digest
from infra.hub.sources import HubError, HubFile, HubSource, HubUnavailable
from infra.mlflow.client import without_password
from infra.settings import Settings

Report = Callable[[int, int], None]
PASSING = (408, 429)
"""Answers of a hub that is asked too much."""
REPORT_EVERY_S = 1.0
TIMEOUT_S = 15.0


class Hub:
    """The hub of the settings. Raises HubError where the token of this user cannot be read."""

    def __init__(self, settings: Settings) -> None:
        self._endpoint, self._offline = settings.hf_endpoint, settings.hf_offline
        self._shown, given = without_password(self._endpoint), settings.hf_token
        self._token = given.get_secret_value() if given else _token_in(settings.hf_home / "token")

    def look_up(self, source: HubSource) -> tuple[str, dict[str, HubFile]]:
        """The commit of the source's revision, and all of its files. Raises HubError or HubUnavailable."""
        from huggingface_hub import HfApi

        with self._explaining(source):
            api = HfApi(self._endpoint, token=self._token or False)
            ask: Callable[..., Any] = api.dataset_info if source.kind == "dataset" else api.model_info
            found = ask(source.repository, revision=source.revision, files_metadata=True, timeout=TIMEOUT_S)
        files = {one.rfilename: HubFile(one.size or 0, one.lfs and one.lfs.sha256) for one in found.siblings or ()}
        return str(found.sha), files

    def read(self, source: HubSource, name: str, folder: Path) -> None:
        """Put one small file of a repository into a folder, and so find out whether it may be read at all."""
        from huggingface_hub import hf_hub_download

        with self._explaining(source):
            hf_hub_download(
                source.repository,
                name,
                repo_type=source.repository_type,
                revision=source.revision,
                local_dir=folder,
                token=self._token or False,
                endpoint=self._endpoint,
            )

    def require_readable(self, source: HubSource, name: str) -> None:
        """Raise HubError where the token, or nobody's, may not read a file; nothing of it is read."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with self._explaining(source):
            url = hf_hub_url(
                source.repository,
                name,
                repo_type=source.repository_type,
                revision=source.revision,
                endpoint=self._endpoint,
            )
            get_hf_file_metadata(url, token=self._token or False, endpoint=self._endpoint)

    def download(self, source: HubSource, files: Mapping[str, HubFile], folder: Path, report: Report) -> None:
        """Have these files in a folder, also those that are partly there; `report` hears of bytes, done and in all.

        Raises HubUnavailable for a file that did not come as the hub says that it is, and HubError without room for it.
        """
        import huggingface_hub

        fetch: Callable[..., str] = huggingface_hub.snapshot_download
        size = sum(file.size for file in files.values())
        folder.mkdir(parents=True, exist_ok=True)
        missing = size - sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if missing > (free := shutil.disk_usage(folder).free):
            raise HubError(
                f"{source.name} needs {missing / 2**30:.1f} GiB more, and the disk of {folder} has "
                f"{free / 2**30:.1f} GiB free: free some, or set PPOFLOW_HOME to another disk"
            )
        counted = _Counted()
        # In a thread of its own, for Ctrl-C: the library would wait for whole files.
        with self._explaining(source), ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                fetch,
                source.repository,
                repo_type=source.repository_type,
                revision=source.revision,
                cache_dir=folder / ".cache",
                local_dir=folder,
                allow_patterns=[_literally(name) for name in files],
                token=self._token or False,
                endpoint=self._endpoint,
                tqdm_class=partial(_Bar, counted),
            )
            try:
                while not wait([done], timeout=REPORT_EVERY_S).done:
                    report(min(counted.bytes, size), size)
                done.result()
            except BaseException:
                counted.stopped = True
                raise
        for name, file in files.items():
            there = folder / name
            whole = there.is_file() and there.stat().st_size == file.size
            if not whole or file.sha256 not in (None, file_digest(there)):
                there.unlink(missing_ok=True)
                raise HubUnavailable(
                    f"{name} of {source.name} was not downloaded completely from {self._shown}: try again"
                )

    @contextmanager
    def _explaining(self, source: HubSource) -> Iterator[None]:
        """Say in our words what the library's errors mean."""
        if self._offline:
            raise HubError(
                f"{source.name} is not in the store, and HF_HUB_OFFLINE forbids downloads: unset it, run ppoflow "
                "download with this store (PPOFLOW_STORE) where there is a network, or give a local folder or file"
            )
        from huggingface_hub import errors

        place, shown = f"{self._shown}/{_address(source)}", "with this token" if self._token else "without a token"
        try:
            yield
        except errors.GatedRepoError:
            raise HubError(
                f"{source.name} is gated, and cannot be read {shown}: accept its terms at {place}, and set HF_TOKEN to "
                "a token of that account"
            ) from None
        except errors.RepositoryNotFoundError:
            hint = "" if source.kind == "dataset" else "; a dataset goes into dataset.train"
            raise HubError(
                f"{source.name}: {self._shown} has no {source.repository_type} {source.repository}, or none that "
                f"can be seen {shown}: check the spelling{hint}; for a private one, set HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise HubError(
                f"{source.name}: {source.repository} has no revision {source.revision}: {place}/tree/main has its "
                "branches, tags and commits; or leave it out for the main branch"
            ) from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in PASSING or status >= 500:
                raise self._unavailable(source, f"HTTP {status}") from None
            remedy = "give another HF_TOKEN, or none" if status == 401 else f"see {place}"
            raise HubError(f"{source.name}: {self._shown} answers HTTP {status}: {remedy}") from None
        except (
            errors.HTTPError,
            errors.EntryNotFoundError,
            errors.FileMetadataError,
            errors.XetDownloadError,
        ) as error:
            raise self._unavailable(source, type(error.__cause__ or error).__name__) from None
        except ConnectionError as error:
            raise self._unavailable(source, type(error).__name__) from None

    def _unavailable(self, source: HubSource, what: str) -> HubUnavailable:
        return HubUnavailable(
            f"{source.name}: the hub at {self._shown} does not answer as it should ({what}): try again; check "
            "HF_ENDPOINT, and HTTPS_PROXY behind a proxy; without a network, give a local folder or file"
        )


def _token_in(place: Path) -> str | None:
    try:
        return place.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise HubError(
            f"the Hugging Face token in {place} cannot be read ({why}): give user {os.geteuid()} permission to read "
            "it, remove it, or set HF_TOKEN"
        ) from None


def _address(source: HubSource) -> str:
    return f"datasets/{source.repository}" if source.kind == "dataset" else source.repository


def _literally(name: str) -> str:
    """A pattern that this name alone matches."""
    return re.sub(r"([*?[])", r"[\1]", name)


@dataclass
class _Counted:
    """The bytes that are on the disk, by all threads of a download; `stopped`: it is to end."""

    bytes: int = 0
    stopped: bool = False
    lock: Lock = field(default_factory=Lock)


class _Bar:
    """What the library takes for one of its progress bars: it shows nothing, and counts bytes."""

    def __init__(self, counted: _Counted, **settings: Any) -> None:
        self.n, self.total = 0, settings.get("total")
        self.format_dict: dict[str, Any] = {}
        self._counted = counted
        self._bytes = settings.get("unit") == "B" and str(settings.get("desc")).startswith("Reconstruct")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to clear."""

    def update(self, count: float | None = 1) -> None:
        """So many more. Raises KeyboardInterrupt once the download is to end."""
        if self._counted.stopped:
            raise KeyboardInterrupt
        with self._counted.lock:
            self._counted.bytes += int(count or 0) if self._bytes else 0

    def nothing(self, *_: object, **__: object) -> None:
        """What a bar would show."""

    refresh = close = set_description = set_description_str = set_postfix_str = nothing
