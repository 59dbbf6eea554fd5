"""A streamed safetensors file is what the safetensors library would have written, and takes nothing but what is due."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from toolkit.checkpoint.header import DTYPES, HeaderError, TensorSpec, read_header
from toolkit.checkpoint.piece_stream import PieceStream
from toolkit.checkpoint.tensor_file import TensorFile

# bool first: what follows is not aligned.
TENSORS = {
    "mask": torch.tensor([True, False, True]),
    "weight": torch.randn(5, 3),
    "step": torch.tensor(7),
    "half": torch.randn(7).bfloat16(),
    "nothing": torch.empty(0, 3),
    "nothing either": torch.empty(3, 0),
    "turned": torch.randn(4, 6).T,
    "ünïcode": torch.arange(5),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    stream = PieceStream()
    try:
        file = TensorFile(path.parent, path.name, [TensorSpec.of(*item) for item in tensors.items()], stream)
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.close()
    finally:
        stream.close()
    assert stream.wait()
    assert stream.failure is None
    (record,) = stream.records
    assert record.path == path.name
    return record.size, record.sha256


@pytest.fixture
def stream() -> Iterator[PieceStream]:
    stream = PieceStream()
    yield stream
    stream.close()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "file", TENSORS)
    read = load_file(tmp_path / "file")
    assert read.keys() == TENSORS.keys()
    assert all(same(read[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_slice("turned")[1:3], TENSORS["turned"][1:3])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_survives_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (24,), dtype=torch.uint8) if dtype == torch.bool else torch.arange(24).to(torch.uint8)
    tensors = {"odd": torch.zeros(1, dtype=torch.uint8), "values": bits.view(dtype)}
    write(tmp_path / "file", tensors)
    assert same(load_file(tmp_path / "file")["values"], tensors["values"])


def test_nan_and_infinity_survive_to_the_bit(tmp_path: Path) -> None:
    values = torch.tensor([0x7FC00001, 0x7F800000, -1, 0x00000001], dtype=torch.int32).view(torch.float32)
    write(tmp_path / "file", {"a": values})
    assert same(load_file(tmp_path / "file")["a"], values)


def test_a_large_tensor_goes_out_in_pieces(tmp_path: Path) -> None:
    large = torch.randn(2_500_000)
    size, sha256 = write(tmp_path / "file", {"a": large})
    assert same(load_file(tmp_path / "file")["a"], large)
    assert sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    assert size == (tmp_path / "file").stat().st_size


def test_size_and_hash_are_those_of_the_file(tmp_path: Path) -> None:
    size, sha256 = write(tmp_path / "file", TENSORS)
    content = (tmp_path / "file").read_bytes()
    assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_our_reader_finds_the_same_tensors_in_the_same_order(tmp_path: Path) -> None:
    write(tmp_path / "file", TENSORS)
    assert list(read_header(tmp_path / "file").values()) == [TensorSpec.of(*item) for item in TENSORS.items()]


def test_our_reader_reads_what_the_library_wrote(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "file")
    assert read_header(tmp_path / "file") == {item[0]: TensorSpec.of(*item) for item in TENSORS.items()}


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("b", torch.zeros(3), r"b \[3\] float32 was given, where a \[2\] float32 is due"),
        ("a", torch.zeros(3), r"a \[3\]"),
        ("a", torch.zeros(2).bfloat16(), "bfloat16"),
    ],
)
def test_what_is_not_due_is_refused(
    tmp_path: Path, stream: PieceStream, name: str, tensor: torch.Tensor, said: str
) -> None:
    specs = [TensorSpec(name=name, shape=(size,), dtype=torch.float32) for name, size in (("a", 2), ("b", 3))]
    with pytest.raises(ValueError, match=said):
        TensorFile(tmp_path, "file", specs, stream).write(name, tensor)


def test_a_tensor_may_come_in_runs_of_its_bytes(tmp_path: Path, stream: PieceStream) -> None:
    tensors = {"a": torch.randn(7), "b": torch.randn(3)}
    file = TensorFile(tmp_path, "file", [TensorSpec.of(*item) for item in tensors.items()], stream)
    content = tensors["a"].view(torch.uint8)
    file.write_bytes("a", [content[:5], content[5:9]])
    assert not file.is_complete
    file.write_bytes("a", [content[9:]])
    file.write("b", tensors["b"])
    file.close()
    stream.close()
    assert stream.wait()
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "file").items())


def test_too_many_bytes_of_a_tensor_and_too_few_are_refused(tmp_path: Path, stream: PieceStream) -> None:
    specs = [TensorSpec(name=name, shape=(2,), dtype=torch.float32) for name in ("a", "b")]
    file = TensorFile(tmp_path, "file", specs, stream)
    with pytest.raises(ValueError, match="9 bytes were given, where a"):
        file.write_bytes("a", [torch.zeros(9, dtype=torch.uint8)])
    other = TensorFile(tmp_path, "other", specs, stream)
    other.write_bytes("a", [torch.zeros(7, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="b was given, where a"):
        other.write_bytes("b", [torch.zeros(8, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"a \[2\] float32 is due"):
        other.close()


def test_a_tensor_too_many_is_refused(tmp_path: Path, stream: PieceStream) -> None:
    file = TensorFile(tmp_path, "file", [TensorSpec.of("a", torch.zeros(2))], stream)
    file.write("a", torch.zeros(2))
    with pytest.raises(ValueError, match="all 1 tensors"):
        file.write("b", torch.zeros(2))


def test_a_file_with_a_tensor_missing_cannot_be_closed(tmp_path: Path, stream: PieceStream) -> None:
    with pytest.raises(ValueError, match=r"a \[2\] float32 is due"):
        TensorFile(tmp_path, "file", [TensorSpec.of("a", torch.zeros(2))], stream).close()


def test_a_file_that_exists_is_not_written_over(tmp_path: Path, stream: PieceStream) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        TensorFile(tmp_path, "file", [], stream)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_header_that_the_library_would_refuse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.checkpoint.header._MAX_HEADER_BYTES", 100)
    with pytest.raises(HeaderError, match="would refuse"):
        write(tmp_path / "file", TENSORS)
