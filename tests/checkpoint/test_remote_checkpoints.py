"""Checkpoints behind URLs: the files of one on disk, whole or not there at all, whatever the server does meanwhile."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nonempty import nonempty
from s3_server import CUT, S3Proxy, found_server, s3_server
from tiny_checkpoint import SIZES, contents_of, save_tiny, tensors_of

from toolkit import remote_files
from toolkit.checkpoint import remote_commit
from toolkit.checkpoint.commit import Retention
from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.save import AsyncSaver
from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.verify import verify
from toolkit.cli.main import main
from toolkit.convert.export_model import export_checkpoint
from toolkit.errors import CheckpointError, ToolkitError
from toolkit.remote_files import RemotePath

RunRanks = Callable[..., list[Any]]
Dstk = Callable[..., tuple[int, str, str]]
URL = RemotePath("s3://models/run")
LAST = "optimizer/exp_avg_sq-00001"
"""Part of the name of a file that one rank uploads."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[S3Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def server(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """The server, with an empty bucket, which this process and ranks find by their environment."""
    with found_server(proxy, monkeypatch, "models") as server:
        yield server


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but its manifest, here or behind a URL."""
    if isinstance(directory, RemotePath):
        paths = list(directory.sizes())
        return {path: (directory / path).open_binary().read() for path in paths if path != "manifest.json"}
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def names(url: RemotePath = URL) -> list[str]:
    return [path.name for path in url.iterdir()]


@pytest.mark.parametrize("place", ["s3", "file", "memory"])
def test_it_has_the_files_and_the_bytes_of_a_checkpoint_on_disk(place: str, tmp_path: Path) -> None:
    url = {"s3": URL, "file": RemotePath(f"file://{tmp_path}/there"), "memory": RemotePath("memory://there/run")}[place]
    here = save_tiny(tmp_path / "here", 4).path
    there = save_tiny(tmp_path / "run", 4, url=url).path
    assert there == url / "step-00000004"
    assert contents(there) == contents(here)
    assert verify(there) == []
    assert names(url) == ["latest", "step-00000004"]
    assert list((tmp_path / "run").iterdir()) == []


def test_ranks_upload_what_they_wrote_and_nobody_else_does(tmp_path: Path, ranks: RunRanks, server: S3Proxy) -> None:
    ranks(save_on_its_own_disk, 3, tmp_path)
    staged = [path.name for path in tmp_path.iterdir()]
    assert sorted(staged) == ["disk-0", "disk-1", "disk-2"]
    here = save_tiny(tmp_path / "here", 4, ranks=Ranks.single()).path
    read = CheckpointReader(URL / "step-00000004")
    for kind, tensors in tensors_of(4).items():
        assert all(torch.equal(read.tensor(kind, name).clone(), value) for name, value in tensors.items())
    sent = [request.path for request in server.of("PUT", ".safetensors")]
    assert len(sent) == len(set(sent)) > 3
    assert verify(URL / "step-00000004") == verify(here) == []


def save_on_its_own_disk(folder: Path, is_async: bool = False) -> str:
    """Save as a rank whose host shares no file system with the others; return what is left there, or the error."""
    run_dir = folder / f"disk-{dist.get_rank()}"
    run_dir.mkdir(exist_ok=True)
    try:
        if is_async:
            saver = AsyncSaver(sizes=SIZES)
            saver.begin(run_dir, 4, contents_of(4, url=URL))
            saver.finish()
        else:
            save_tiny(run_dir, 4, url=URL)
    except CheckpointError as error:
        return f"{error} {list(run_dir.iterdir())}"
    assert list(run_dir.iterdir()) == []
    return ""


def test_an_asynchronous_save_uploads_the_same_bytes(tmp_path: Path, ranks: RunRanks) -> None:
    ranks(save_on_its_own_disk, 3, tmp_path)
    expected = contents(URL / "step-00000004")
    (URL / "step-00000004").remove_files()
    ranks(save_on_its_own_disk, 3, tmp_path, True)
    assert contents(URL / "step-00000004") == expected


FAULTS = {
    "AccessDenied": "(access is denied). Earlier checkpoints are unaffected. Check the credentials in the environment.",
    "EntityTooLarge": "(there is no room (EntityTooLarge was asked for)). Earlier checkpoints",
    "XMinioStorageFull": "(there is no room (",
    "SlowDown": "(the connection failed 4 times (OSError: SlowDown was asked for)). Earlier",
    CUT: "(the connection failed 4 times (",
}


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["sync", "async"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_rank_is_the_same_line_on_all_and_leaves_no_checkpoint(
    fault: str, is_async: bool, tmp_path: Path, ranks: RunRanks, server: S3Proxy
) -> None:
    save_tiny(tmp_path / "earlier", 1, url=URL)
    server.fault = lambda method, path: fault if method == "PUT" and LAST in path else None
    seen = ranks(save_on_its_own_disk, 3, tmp_path, is_async)
    assert len(set(seen)) == 1
    line = seen[0].removesuffix(" []")
    assert line.startswith(f"{URL}/step-00000004: rank ")
    assert f" failed at {URL}/step-00000004/{LAST}" in line
    assert FAULTS[fault] in line
    assert line.isprintable()
    assert not line.startswith(f"{URL}/step-00000004: rank 0 ")
    server.fault = lambda method, path: None
    assert [listed.step for listed in list_checkpoints(URL)] == [1]
    assert select_checkpoint(URL).path == URL / "step-00000001"
    save_tiny(tmp_path / "later", 5, url=URL)
    assert names() == ["latest", "step-00000001", "step-00000005"]  # and what the failed one left is gone


def test_a_manifest_that_cannot_be_written_is_no_checkpoint(tmp_path: Path, server: S3Proxy) -> None:
    server.fault = lambda method, path: "InternalError" if method == "PUT" and "manifest" in path else None
    with pytest.raises(CheckpointError, match="manifest"):
        save_tiny(tmp_path / "run", 4, url=URL)
    assert list_checkpoints(URL) == []


def test_what_has_arrived_is_not_sent_again_after_a_cut(tmp_path: Path, server: S3Proxy) -> None:
    cuts = iter([True, True])
    server.fault = lambda method, path: CUT if method == "PUT" and LAST in path and next(cuts, False) else None
    checkpoint = save_tiny(tmp_path / "run", 4, url=URL).path
    assert verify(checkpoint) == []
    sent = [request.path for request in server.of("PUT", ".safetensors")]
    assert len(sent) == len(set(sent)) > 3


def test_a_file_whose_answer_was_lost_is_not_sent_again(tmp_path: Path) -> None:
    import fsspec.implementations.memory as memory

    sent = []
    put = memory.MemoryFileSystem.put_file

    def put_and_fail(files: Any, here: str, there: str, **options: Any) -> None:
        sent.append(there)
        put(files, here, there, **options)
        raise ConnectionResetError

    (tmp_path / "file").write_bytes(b"content")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory.MemoryFileSystem, "put_file", put_and_fail)
        (RemotePath("memory://lost") / "file").upload(tmp_path / "file", lambda: None)
    assert len(sent) == 1


def test_a_slow_server_is_no_fault(tmp_path: Path, ranks: RunRanks, server: S3Proxy) -> None:
    server.fault = lambda method, path: 1.5 if method == "PUT" and LAST in path else None
    assert ranks(save_on_its_own_disk, 3, tmp_path) == ["", "", ""]
    assert verify(URL / "step-00000004") == []


def test_a_large_file_is_sent_in_parts_of_which_a_lost_one_is_sent_again(
    tmp_path: Path, server: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 << 20
    monkeypatch.setattr(remote_files, "_UPLOAD_PART_BYTES", part)
    content = os.urandom(12 << 20)
    (tmp_path / "large").write_bytes(content)
    faults = iter(["SlowDown", CUT])
    server.fault = lambda method, path: next(faults, None) if "partNumber=2" in path else None
    arrived: list[int] = []
    (URL / "large").upload(tmp_path / "large", lambda: arrived.append(1))
    assert (URL / "large").open_binary().read() == content
    assert max(request.sent for request in server.of("PUT", "large")) == part
    assert [len(server.of("PUT", f"partNumber={number}")) for number in (1, 2, 3)] == [1, 2, 1]  # without the cut one
    assert len(server.of("POST", "uploads")) == 1
    assert len(arrived) >= 3


def test_a_step_that_is_saved_again_keeps_the_old_one_until_the_new_one_is_complete(
    tmp_path: Path, server: S3Proxy
) -> None:
    keep = Retention(newest=1)
    first = save_tiny(tmp_path / "run", 4, url=URL, retention=keep).path
    server.fault = lambda method, path: "AccessDenied" if method == "PUT" and LAST in path else None
    with pytest.raises(CheckpointError):
        save_tiny(tmp_path / "run", 4, url=URL, retention=keep)
    assert verify(first) == []
    assert select_checkpoint(URL).path == first
    server.fault = lambda method, path: None
    second = save_tiny(tmp_path / "run", 4, url=URL, retention=keep).path
    assert second.name == "step-0000000004"  # the failed one had begun to write a directory of one zero less
    assert names() == ["latest", second.name]
    assert save_tiny(tmp_path / "run", 4, url=URL, retention=keep).path == first


def test_old_ones_are_deleted_manifest_first(tmp_path: Path, server: S3Proxy) -> None:
    for step in (10, 20, 30):
        save_tiny(tmp_path / "run", step, url=URL, retention=Retention(newest=1, every=20))
    assert names() == ["latest", "step-00000020", "step-00000030"]
    deleted = server.of("DELETE", "manifest.json")
    assert [request.path.split("/")[-2] for request in deleted] == ["step-00000010"]
    others = server.of("POST", "delete")
    assert server.requests.index(deleted[0]) < server.requests.index(nonempty(others)[0])


def test_a_deletion_that_was_interrupted_leaves_no_checkpoint_and_is_completed(tmp_path: Path, server: S3Proxy) -> None:
    save_tiny(tmp_path / "run", 10, url=URL)
    server.fault = lambda method, path: "InternalError" if method == "POST" and "delete" in path else None
    saved = save_tiny(tmp_path / "run", 20, url=URL, retention=Retention(newest=1))
    assert len(saved.notices) == 1
    assert f"{URL}/step-00000010 could not be deleted" in saved.notices[0]
    assert [listed.step for listed in list_checkpoints(URL)] == [20]
    assert "step-00000010" in names()
    server.fault = lambda method, path: None
    save_tiny(tmp_path / "run", 30, url=URL)
    assert names() == ["latest", "step-00000020", "step-00000030"]


def test_a_directory_of_someone_else_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    (URL / "step-00000004" / "model.safetensors").write_bytes(b"a copy that is under way")
    saved = save_tiny(tmp_path / "run", 4, url=URL, retention=Retention(newest=1))
    assert saved.path.name == "step-000000004"
    assert (URL / "step-00000004").sizes() == {"model.safetensors": 24}


def save_until_killed(folder: Path, victim: int, requests: int) -> None:
    """Save steps 10, 20, 20, 30, 30, …; `victim` dies at its so-many-th upload after the first checkpoint."""
    run_dir = folder / f"disk-{dist.get_rank()}"
    keep = Retention(newest=1)
    save_tiny(run_dir, 10, url=URL)
    upload = RemotePath.upload
    count = 0

    def upload_or_die(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == requests and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        upload(*arguments)

    RemotePath.upload = upload_or_die  # type: ignore[method-assign]
    for i in range(2, 1000):
        save_tiny(run_dir, i // 2 * 10 + 10, url=URL, retention=keep)
        if dist.get_rank() == 0:
            (folder / "committed").write_text(str(i // 2 * 10 + 10))


KILLS = [(2, 8), *(pytest.param(*case, marks=pytest.mark.whole) for case in ((0, 1), (1, 3)))]


@pytest.mark.parametrize(("victim", "requests"), KILLS)
def test_kill_9_inside_an_upload_leaves_the_newest_checkpoint_whole(
    victim: int, requests: int, tmp_path: Path, ranks: RunRanks
) -> None:
    from toolkit.launch.local_ranks import RankFailedError

    (tmp_path / "committed").write_text("10")
    with pytest.raises(RankFailedError):
        ranks(save_until_killed, 3, tmp_path, victim, requests)
    assert [path for path in names() if path.endswith(".tmp")]
    chosen = select_checkpoint(URL)
    assert not chosen.notices
    assert verify(chosen.path) == []
    step = CheckpointReader(chosen.path).step
    assert step is not None
    assert step >= int((tmp_path / "committed").read_text())
    save_tiny(tmp_path / "next", 7, url=URL)
    assert [path for path in names() if path.endswith(".tmp")] == []
    assert all((path / "manifest.json").exists() for path in URL.iterdir() if path.name != "latest")


def damage(change: str) -> None:
    model = URL / "step-00000020" / "model-00001-of-00002.safetensors"
    content = model.open_binary().read()
    if change == "bit":
        model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif change == "shorter":
        model.write_bytes(content[:-1])
    elif change == "missing":
        model.unlink()
    else:
        (model.parent / "other").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("bit", "model-00001-of-00002.safetensors: its sha256 differs from what was written"),
        ("shorter", "model-00001-of-00002.safetensors: "),
        ("missing", "model-00001-of-00002.safetensors: missing"),
        ("more", "other: not in the manifest"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_used(change: str, problem: str, tmp_path: Path) -> None:
    for step in (10, 20):
        save_tiny(tmp_path / "run", step, url=URL)
    damage(change)
    assert any(found.startswith(problem) for found in verify(URL / "step-00000020"))
    chosen = select_checkpoint(URL)
    assert chosen.path.name == "step-00000010"
    assert "step-00000020 is damaged" in chosen.notices[0]


@pytest.mark.parametrize("part", ["manifest", "model-00001", "list-type"])
def test_a_server_that_fails_is_an_error_and_never_a_reason_for_an_older_checkpoint(
    part: str, tmp_path: Path, ranks: RunRanks, server: S3Proxy
) -> None:
    for step in (10, 20):
        save_tiny(tmp_path / "run", step, url=URL)
    server.fault = lambda method, path: "InternalError" if method in ("GET", "HEAD") and part in path else None
    seen = ranks(select_or_fail, 3)
    assert len(set(seen)) == 1
    assert f"{URL}: the connection failed 4 times" in seen[0]
    assert seen[0].endswith("Run it again: it goes on where it was.")


def select_or_fail() -> str:
    try:
        return str(select_checkpoint(URL))
    except ToolkitError as error:
        return str(error)


def test_a_rank_reads_the_bytes_of_its_part_alone(tmp_path: Path, server: S3Proxy) -> None:
    from tiny_checkpoint import TensorGroup

    from toolkit.checkpoint.safetensors_header import TensorSpec

    large = {"wte.weight": torch.randn(4096, 1024), "h.0.ln.bias": torch.randn(5)}
    specs = [TensorSpec.of(*item) for item in large.items()]
    group = TensorGroup(kind="model", specs=specs, tensors=large.items())
    read = CheckpointReader(save_tiny(tmp_path / "run", 4, url=URL, groups=[group]).path)
    server.requests.clear()
    tensor = read.tensor("model", "wte.weight")
    assert torch.equal(tensor.narrow(0, 1024, 1024), large["wte.weight"][1024:2048])
    answered = sum(request.answered for request in server.of("GET", "model"))
    assert answered == 1024 * 1024 * 4
    assert torch.equal(tensor.narrow(1, 256, 256), large["wte.weight"][:, 256:512])
    assert torch.equal(tensor.clone(), large["wte.weight"])
    bias = read.tensor("model", "h.0.ln.bias", dtype=torch.bfloat16)
    assert torch.equal(bias.clone(), large["h.0.ln.bias"].bfloat16())


def test_ranks_divide_what_they_hash(tmp_path: Path, ranks: RunRanks, server: S3Proxy) -> None:
    checkpoint = save_tiny(tmp_path / "run", 4, url=URL).path
    size = sum(checkpoint.sizes().values())
    server.requests.clear()
    assert ranks(verify, 3, checkpoint) == [[], [], []]
    read = sum(request.answered for request in server.of("GET", "step-00000004/"))
    assert size < read < 2.5 * size  # headers and small files are read once more, by the first rank


@pytest.fixture
def dstk(capsys: pytest.CaptureFixture[str]) -> Dstk:
    """Run a command here: its exit code, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_commands_read_urls(tmp_path: Path, dstk: Dstk) -> None:
    for step in (10, 20):
        save_tiny(tmp_path / "run", step, url=URL)
    code, output, errors = dstk("checkpoint", "list", URL)
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()] == ["step", "10", "20"]
    assert f"{URL}/step-00000010: complete" in dstk("checkpoint", "verify", URL)[1]
    damage("bit")
    code, _, errors = dstk("checkpoint", "verify", URL)
    assert code == 2
    assert errors.splitlines() == [
        f"{URL}/step-00000020: model-00001-of-00002.safetensors: its sha256 differs from what was written"
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["checkpoint", "list", "s3://models/nothing"], "s3://models/nothing: no such directory. Name a run or"),
        (
            ["checkpoint", "verify", "s3://nobody/x"],
            "s3://nobody/x: there is no such bucket. Check the URL",
        ),
        (["checkpoint", "inspect", "warp://x/y"], "warp://x/y: Protocol not known: warp. Use s3://"),
        (
            ["sample", "s3://models/run"],
            "s3://models/run: this command reads directories, not URLs. Copy",
        ),
        (["export", "s3://models/run", "-o", "x", "--verify"], "--verify with s3://models/run: transformers reads"),
    ],
)
def test_what_cannot_be_read_is_one_line(words: list[str], line: str, dstk: Dstk) -> None:
    code, output, errors = dstk(*words)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1


def test_an_export_is_that_of_the_same_checkpoint_on_disk(tmp_path: Path) -> None:
    here = save_tiny(tmp_path / "here", 4).path
    save_tiny(tmp_path / "run", 4, url=URL)
    export_checkpoint(here, tmp_path / "from-disk")
    export_checkpoint(URL, tmp_path / "from-url")
    assert "model.safetensors" in contents(tmp_path / "from-url")
    assert contents(tmp_path / "from-url") == contents(tmp_path / "from-disk")


def test_progress_is_reported_while_a_slow_upload_goes_on(tmp_path: Path, server: S3Proxy) -> None:
    server.fault = lambda method, path: 0.7 if method == "PUT" and ".safetensors" in path else None
    began = threading.Event()
    reports: list[bool] = []
    upload = remote_commit.upload

    def noted(*arguments: Any) -> None:
        began.set()
        upload(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("toolkit.checkpoint.save.upload", noted)
        save_tiny(tmp_path / "run", 4, url=URL, progress=lambda: reports.append(began.is_set()))
    assert reports.count(True) >= 2
