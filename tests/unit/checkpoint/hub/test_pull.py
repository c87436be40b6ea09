"""What a pull leaves behind is what the hub promised, whatever the server does."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from colibri.checkpoint.hub.fetch import Patience
from colibri.checkpoint.hub.meter import PullProgress
from colibri.checkpoint.hub.names import RepoName, snapshot_of
from colibri.checkpoint.hub.place import ORIGIN, Cached, Folder, Origin, Place
from colibri.checkpoint.hub.pull import PullReport, pull
from colibri.checkpoint.hub.repository import Listing, list_files
from colibri.errors import HubError, WriteError
from tests.hub import COMMIT, PIECE, Hub

REPO = RepoName("owner/model")
SHARD = "model-00001-of-00002.safetensors"
HURRY = Patience(silent_s=0.3, slow_s=0.2, attempts=3, pause_s=0.001)
FILES = {
    "config.json": b"{}",
    SHARD: os.urandom(5 * PIECE + 17),
    "model-00002-of-00002.safetensors": os.urandom(1000),
    "tokenizer/extra.json": b'{"a": 1}',
}


@pytest.fixture
def served(hub: Hub) -> Hub:
    hub.repos[REPO.repo] = dict(FILES)
    return hub


def bring(
    place: Place | None = None, listing: Listing | None = None, **options: object
) -> PullReport:
    listing = listing or list_files(REPO)
    options.setdefault("patience", HURRY)
    return pull(listing, listing.files, place or Cached(listing), **options)  # type: ignore[arg-type]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ORIGIN
    }


def test_a_pull_fills_the_shared_cache(served: Hub) -> None:
    from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache

    report = bring()
    assert contents(report.directory) == FILES
    assert report.fetched_bytes == report.total_bytes == sum(map(len, FILES.values()))
    assert snapshot_of(REPO) == snapshot_of(RepoName(REPO.repo, COMMIT)) == report.directory
    # Others find it too.
    (found,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert (found.repo_id, found.nb_files) == (REPO.repo, len(FILES))
    found_file = try_to_load_from_cache(REPO.repo, SHARD, constants.HF_HUB_CACHE)
    assert found_file == str(report.directory / SHARD)


def test_what_is_there_is_not_fetched_again(served: Hub) -> None:
    bring()
    served.asked.clear()
    assert bring().fetched_bytes == 0
    assert len(served.asked) == 1  # what the repository holds


def test_a_pull_into_a_directory_says_where_it_came_from(served: Hub, tmp_path: Path) -> None:
    place = Folder(list_files(REPO), tmp_path / "here")
    assert contents(bring(place).directory) == FILES
    origin = Origin.of(tmp_path / "here")
    assert origin is not None
    assert (origin.name, origin.commit) == (REPO, COMMIT)
    assert origin.files[SHARD].digest.value == hashlib.sha256(FILES[SHARD]).hexdigest()
    assert bring(Folder(list_files(REPO), tmp_path / "here")).fetched_bytes == 0


def test_files_that_others_put_there_are_checked(served: Hub, tmp_path: Path) -> None:
    right, wrong = tmp_path / "config.json", tmp_path / SHARD
    right.write_bytes(FILES["config.json"])
    wrong.write_bytes(bytes(len(FILES[SHARD])))
    bring(Folder(list_files(REPO), tmp_path))
    assert (served.sent["config.json"], served.sent[SHARD]) == (0, len(FILES[SHARD]))
    assert wrong.read_bytes() == FILES[SHARD]


def test_a_directory_of_another_model_is_refused(served: Hub, tmp_path: Path) -> None:
    bring(Folder(list_files(REPO), tmp_path))
    served.repos["owner/other"] = dict(FILES)
    listing = list_files(RepoName("owner/other"))
    with pytest.raises(HubError, match="holds owner/model, not owner/other"):
        bring(Folder(listing, tmp_path), listing)


def test_a_newer_commit_takes_the_place_of_an_older_one(served: Hub, tmp_path: Path) -> None:
    bring(Folder(list_files(REPO), tmp_path))
    served.commit, served.sent = "a" * 40, type(served.sent)()
    del served.repos[REPO.repo]["config.json"]
    served.repos[REPO.repo]["tokenizer/extra.json"] = b'{"a": 2}'
    bring(Folder(list_files(REPO), tmp_path))
    assert contents(tmp_path) == served.repos[REPO.repo]
    assert set(served.sent) == {"tokenizer/extra.json"}


@pytest.mark.parametrize("begun", [1, PIECE, len(FILES[SHARD]) - 1, len(FILES[SHARD])])
def test_a_pull_goes_on_where_a_killed_one_stopped(served: Hub, begun: int) -> None:
    listing = list_files(REPO)
    place = Cached(listing)
    shard = next(file for file in listing.files if file.name == SHARD)
    place.part(shard).parent.mkdir(parents=True)
    place.part(shard).write_bytes(FILES[SHARD][:begun])
    assert contents(bring(place).directory) == FILES
    assert served.sent[SHARD] == len(FILES[SHARD]) - begun


def test_a_wrong_beginning_is_thrown_away(served: Hub) -> None:
    listing = list_files(REPO)
    place = Cached(listing)
    shard = next(file for file in listing.files if file.name == SHARD)
    place.part(shard).parent.mkdir(parents=True)
    place.part(shard).write_bytes(bytes(PIECE))
    assert contents(bring(place).directory) == FILES


@pytest.mark.parametrize(
    "faults",
    [
        *(["cut", ""], ["cut", "cut", ""], ["busy", ""], ["silent", ""], ["whole"], ["moved", ""]),
        *(["wrong", ""], ["longer"], ["cut", "whole"], ["mute", "mute", "cut", ""]),
    ],
    ids=" ".join,
)
def test_a_server_that_misbehaves_does_no_harm(served: Hub, faults: list[str]) -> None:
    served.faults[SHARD] = faults
    told: list[PullProgress] = []
    assert contents(bring(progress=told.append).directory) == FILES
    assert told[-1].done_bytes == told[-1].total_bytes == sum(map(len, FILES.values()))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wrong", "twice the server sent other bytes than the hub promises .SHA-256"),
        ("mute", "the server does not send it: it is silent, 3 times in a row; run the same"),
        ("busy", "the server does not send it: it answers 503, 3 times in a row"),
        ("gone", "the hub answers 404"),
    ],
)
def test_a_server_that_never_behaves_is_named(served: Hub, fault: str, says: str) -> None:
    served.faults[SHARD] = [fault]
    with pytest.raises(HubError, match=f"{SHARD}: {says}"):
        bring()
    found = snapshot_of(REPO)
    assert found is None or SHARD not in contents(found)


def test_a_range_that_was_not_asked_for_is_refused(served: Hub) -> None:
    served.faults[SHARD] = ["cut", "shifted"]
    with pytest.raises(HubError, match=f"{SHARD}: asked for bytes from"):
        bring()


def test_a_connection_that_trickles_is_given_up(served: Hub) -> None:
    patience = Patience(silent_s=5, slow_s=0.0, least_bytes=1 << 30, attempts=2, pause_s=0.001)
    served.repos[REPO.repo] = {"config.json": b"{}", SHARD: FILES[SHARD]}
    report = bring(patience=patience)  # each attempt brings something, so it comes to an end
    assert report.total_bytes == len(FILES[SHARD]) + 2
    assert len([path for path, _ in served.asked if SHARD in path]) > 1


def test_a_stopped_pull_keeps_what_came(served: Hub) -> None:
    def stop(progress: PullProgress) -> None:
        if progress.done_bytes > len(FILES[SHARD]) // 4:
            raise KeyboardInterrupt

    served.faults[SHARD] = ["silent", ""]
    with pytest.raises(KeyboardInterrupt):
        bring(progress=stop, patience=Patience(silent_s=20))
    assert contents(bring().directory) == FILES
    assert served.sent[SHARD] < 1.6 * len(FILES[SHARD])


def test_again_fetches_everything(served: Hub) -> None:
    report = bring()
    blob = (report.directory / SHARD).resolve()
    blob.write_bytes(bytes(len(FILES[SHARD])))
    assert bring(again=True).fetched_bytes == report.total_bytes
    assert contents(report.directory) == FILES


def test_a_full_disk_is_told_before_anything_is_fetched(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(HubError, match=r"are to be fetched, but only 1000 B are free"):
        bring()
    assert not served.sent


def test_a_disk_that_fills_meanwhile_is_named(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("colibri.checkpoint.hub.fetch.os.fsync", full)
    with pytest.raises(WriteError, match="cannot be written: No space left on device"):
        bring()


def test_two_pulls_into_one_place_are_kept_apart(served: Hub, tmp_path: Path) -> None:
    listing = list_files(REPO)
    with (
        Folder(listing, tmp_path).alone(),
        pytest.raises(HubError, match="another pull is writing here"),
    ):
        bring(Folder(listing, tmp_path))


def test_a_token_is_shown_to_the_hub_alone(served: Hub, tmp_path: Path) -> None:
    served.token = "secret"
    with pytest.raises(HubError, match=r"no leave to see it.*hf auth login"):
        list_files(REPO)
    (tmp_path / "token").write_text("secret\n")
    assert contents(bring().directory) == FILES


def test_threads_end(served: Hub) -> None:
    before = threading.active_count()
    bring()
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("Thread") and "_work" in thread.name:
            thread.join(5)
    assert sum("_work" in thread.name for thread in threading.enumerate()) == 0
    assert before
