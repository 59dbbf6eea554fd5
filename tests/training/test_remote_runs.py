"""Runs whose checkpoints go to a URL: they go on anywhere, one job at a time; mistakes are said at the start."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from s3_server import S3Proxy, found_server, s3_server
from tiny_checkpoint import save_tiny

from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.remote_commit import delete_uploaded
from toolkit.checkpoint.verify import verify
from toolkit.cli.main import main
from toolkit.errors import CheckpointError, RunDirectoryError, ToolkitError
from toolkit.launch.spawn import Restart
from toolkit.remote_files import RemotePath
from toolkit.training.run_lock import Holder, RunLock, UrlLock

Train = Callable[..., str]
URL = RemotePath("s3://models/run")
SETTINGS = ("checkpoint.every=3", f"checkpoint.url={URL}", "train.steps=6")


@pytest.fixture(scope="module")
def proxy() -> Iterator[S3Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def server(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with found_server(proxy, monkeypatch, "models") as server:
        yield server


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def names() -> list[str]:
    return [path.name for path in URL.iterdir()]


@pytest.mark.parametrize("resume", ["auto", f"{URL}/step-00000003"])
def test_a_run_goes_on_in_another_layout_where_nothing_of_it_is(
    resume: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train("run_dir=one", *SETTINGS, "checkpoint.asynchronous=true", parallel={"zero_stage": 2}, world_size=2)
    assert f"checkpoints in {URL}" in output
    assert not [path for path in (tmp_path / "one").iterdir() if "step-" in path.name]
    assert names() == ["latest", "step-00000003", "step-00000006"]  # and no lock
    delete_uploaded(URL / "step-00000006")
    (tmp_path / "one").rename(tmp_path / "gone")
    output = train("run_dir=two", *SETTINGS, "--resume", resume, parallel={"zero_stage": 1, "tp": 2}, world_size=2)
    assert f"{URL}/step-00000003, checkpoint dp2-z2 step 3 → tp2-z1" in output
    expected = metrics(tmp_path / "gone")
    resumed = metrics(tmp_path / "two")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert resumed[:3] == expected[:3]
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in expected], rel=1e-6)
    assert verify(URL / "step-00000006") == []
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "inspect", str(URL), "--tensors"])
    assert not ended.value.code
    assert "transformer.wte.weight" in capsys.readouterr().out


def denies_deletion(method: str, path: str) -> str | None:
    return "AccessDenied" if method == "DELETE" else None


def denies_writing(method: str, path: str) -> str | None:
    return "AccessDenied" if method == "PUT" else None


@pytest.mark.parametrize(
    ("url", "fault", "reason", "remedy"),
    [
        ("s3://nobody/run", None, "there is no such bucket", "check the URL"),
        (str(URL), denies_writing, "access is denied", "check the credentials in the environment"),
        (str(URL), denies_deletion, "access is denied", "check the credentials in the environment"),
        ("warp://models/run", None, "Protocol not known: warp", None),
        ("gs://models/run", None, "gcsfs is not installed, which reads gs://", "run pip install gcsfs"),
    ],
    ids=["no bucket", "no writing", "no deletion", "no protocol", "no package"],
)
def test_a_url_that_cannot_be_written_is_one_line_before_anything_is_done(
    url: str,
    fault: Callable[[str, str], str | None] | None,
    reason: str,
    remedy: str | None,
    train: Train,
    server: S3Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if url.startswith("gs"):
        monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    server.fault = fault or server.fault
    with refused(RunDirectoryError, "checkpoint.url", remedy=remedy) as found:
        train("run_dir=run", "checkpoint.every=1", f"checkpoint.url={url}", data__cache_dir=str(tmp_path / "cache"))
    assert found[0].reason.startswith(f"{reason}, on ")
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


def test_missing_credentials_are_one_line(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with refused(RunDirectoryError, "checkpoint.url") as found:
        train("run_dir=run", *SETTINGS)
    assert found[0].reason.startswith("there are no credentials (")


def test_a_server_that_goes_away_ends_the_run_as_a_full_disk_does(
    train: Train, tmp_path: Path, server: S3Proxy
) -> None:
    server.fault = lambda method, path: "cut" if method == "PUT" and "step-00000006/model" in path else None
    with pytest.raises(CheckpointError, match=rf"^{URL}/step-00000006: rank 0 failed at {URL}/step-00000006/model"):
        train("run_dir=run", *SETTINGS)
    assert [listed.name for listed in list_checkpoints(URL)] == ["step-00000003"]
    assert len(metrics(tmp_path / "run")) == 6
    server.fault = lambda method, path: None
    train("run_dir=run", *SETTINGS, "--resume", "auto")
    assert names() == ["latest", "step-000000006", "step-00000003"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_url_with_checkpoints_is_not_used_by_a_new_run_unless_it_overwrites_them(
    train: Train, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "earlier", 40, url=URL)
    with refused(RunDirectoryError, "checkpoint.url", remedy="add --overwrite to replace them"):
        train("run_dir=run", *SETTINGS)
    assert names() == ["latest", "step-00000040"]
    train("run_dir=run", *SETTINGS, "--overwrite")
    assert names() == ["latest", "step-00000003", "step-00000006"]


def test_a_second_job_at_a_url_is_refused_with_one_line_that_says_by_whom(train: Train) -> None:
    lock = UrlLock(URL)
    lock.acquire()
    with pytest.raises(ToolkitError, match=f"^checkpoint.url={URL}: process .* has trained there since") as error:
        train("run_dir=run", *SETTINGS, "--resume", "auto")
    assert str(error.value).endswith("Wait until it has ended, or end it, or set checkpoint.url to another directory.")
    lock.release()
    assert names() == []


def on(machine: str) -> Holder:
    """This process, as if it ran on another machine."""
    return replace(Holder.here(), host=machine, machine_id=f"boot of {machine}")


def test_the_lock_of_an_ended_process_is_taken_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    UrlLock(URL, replace(Holder.here(), start_ticks=1)).acquire()
    lock = UrlLock(URL)
    lock.acquire()
    assert names() == [".lock-2"]
    assert capfd.readouterr().err == ""
    lock.check()
    lock.release()
    assert names() == []


def test_a_holder_on_another_machine_is_replaced_after_a_lease_and_then_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunLock, "_renew", lambda self: None)
    monkeypatch.setattr(RunLock, "lease_seconds", 0.6)
    suspended = UrlLock(URL, on("node2"))
    suspended.acquire()
    lock = UrlLock(URL, on("node1"))
    lock.acquire()
    assert names() == [".lock-1", ".lock-2"]
    with pytest.raises(RunDirectoryError, match="on node1 may train there now"):
        suspended.check()
    lock.check()
    lock.release()
    UrlLock(URL, on("node3")).acquire()


def test_a_live_holder_on_another_machine_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock, "lease_seconds", 3.0)  # a heartbeat each half second
    UrlLock(URL, on("node2")).acquire()
    monkeypatch.setattr(RunLock, "lease_seconds", 60.0)
    with pytest.raises(RunDirectoryError, match="on node2 has trained there since"):
        UrlLock(URL, on("node1")).acquire()


def test_a_lock_that_cannot_be_reached_for_a_while_is_not_lost(
    server: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLock, "_renew", lambda self: None)
    lock = UrlLock(URL)
    lock.acquire()
    server.fault = lambda method, path: "InternalError"
    lock.check()  # it was there a moment ago
    monkeypatch.setattr(RunLock, "lease_seconds", 0.0)
    with pytest.raises(RunDirectoryError, match="the connection failed 4 times"):
        lock.check()
    server.fault = lambda method, path: None
    lock.check()


def test_a_store_without_conditional_writes_leaves_the_lock_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second creates the same object: it replaces the first one, which notices before it writes."""
    monkeypatch.setattr(RunLock, "_renew", lambda self: None)
    monkeypatch.setattr(RemotePath, "create", lambda path, content: bool(path.write_bytes(content)))
    first = UrlLock(URL, on("node1"))
    second = UrlLock(URL, on("node2"))
    assert first._create(0, b"")
    assert second._create(0, b"")
    with pytest.raises(RunDirectoryError, match="on node2 may train there now"):
        first.check()
    second.check()


def test_a_restart_goes_on_from_the_url(tmp_path: Path) -> None:
    again = Restart(run_dir=tmp_path / "run", arguments=["--config", "x"], resume=None, overwrite=False, url=str(URL))
    assert "--resume" not in again.arguments(1)[0]
    save_tiny(tmp_path / "run", 4, url=URL)
    arguments, origin = again.arguments(1)
    assert arguments[-2:] == ["--resume", "auto"]
    assert origin == f"resuming from step-00000004 in {URL}"
