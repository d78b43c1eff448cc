"""Hub ids: what is fetched, the offline cache, and errors that say what to do. No network is touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from adapter_bed import adapter, config, llama, save
from huggingface_hub import errors as hub_errors

from hf_multilora.adapters import hub
from hf_multilora.adapters.load import load_plan
from hf_multilora.errors import AdapterFormatError, AdapterNotFoundError

COMMIT = "49e3418fbbbca6ecbdf9608b4d22e5a407081db4"
TENSORS = adapter(llama(), ["q_proj"])
CONFIG = config(target_modules=["q_proj"])


def read(source: str, **options):
    return load_plan(source, llama(), max_lora_rank=64, **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache of this test's own; returns the place of org/sql's snapshot in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--sql"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return repo / "snapshots" / COMMIT


@pytest.mark.parametrize("subfolder", [None, "checkpoint-7"])
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_cache(cache: Path, subfolder: str | None, revision: str | None) -> None:
    save(cache / (subfolder or ""), TENSORS, CONFIG)
    plan = read("org/sql", subfolder=subfolder, revision=revision, local_files_only=True)
    assert len(plan.factors) == 2
    assert plan.fingerprint_of_source == COMMIT
    assert plan.source == ("org/sql/checkpoint-7" if subfolder else "org/sql") + f"@{COMMIT[:12]}"


def test_cached_torch_file(cache: Path) -> None:
    import torch

    save(cache, {}, CONFIG)
    torch.save(TENSORS, cache / "adapter_model.bin")
    assert len(read("org/sql", local_files_only=True).factors) == 2


def test_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="org/other: not in the hub's cache.*And no folder 'org/other'"):
        read("org/other", local_files_only=True)
    save(cache, {}, CONFIG)
    with pytest.raises(AdapterFormatError, match="without weights.*Load it once with network"):
        read("org/sql", local_files_only=True)


def test_a_folder_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(cache, {}, CONFIG)
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "org" / "sql", TENSORS, CONFIG)
    assert read("org/sql").source == "org/sql"


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, error: Exception | None = None) -> list[dict]:
    """Replace the download by a copy from `folder`; returns the calls made."""
    calls: list[dict] = []

    def fetch(repo: str, name: str, **options) -> str:
        calls.append({"repo": repo, "name": name, **options})
        if error is not None:
            raise error
        source = folder / name
        if not source.exists():
            raise hub_errors.EntryNotFoundError(f"404 {name}")
        target = folder.parent / "snapshots" / COMMIT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        return str(target)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    return calls


def test_only_the_adapters_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config first, at the revision asked for; then the weights at the commit that this was."""
    folder = save(tmp_path / "repo", TENSORS, CONFIG)
    (folder / "model.safetensors").write_bytes(b"large")
    calls = serve(monkeypatch, folder)
    read("org/sql", revision="v1", token="secret")
    assert [(call["name"], call["revision"]) for call in calls] == [
        ("adapter_config.json", "v1"),
        ("adapter_model.safetensors", COMMIT),
    ]
    assert all(call["token"] == "secret" for call in calls)


def test_repository_without_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, save(tmp_path / "repo", TENSORS, None))
    with pytest.raises(AdapterFormatError, match="org/sql: the repository holds no adapter_config.json.*subfolder="):
        read("org/sql")
    serve(monkeypatch, save(tmp_path / "other", {}, CONFIG))
    with pytest.raises(AdapterFormatError, match="without weights"):
        read("org/sql")


def _http(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "server said no")
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_http(hub_errors.RepositoryNotFoundError), "no such repository, or it is private"),
        (_http(hub_errors.GatedRepoError), "gated: accept its terms"),
        (_http(hub_errors.RevisionNotFoundError), "check revision="),
        (hub_errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (ConnectionError("no route"), "ConnectionError: no route"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_hub_errors(error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, tmp_path, error)
    with pytest.raises(AdapterNotFoundError, match=f"org/sql@v1: .*{words}") as raised:
        read("org/sql", revision="v1")
    assert raised.value.__cause__ is error
