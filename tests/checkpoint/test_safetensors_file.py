"""A safetensors file written tensor by tensor equals the library's, and accepts only the expected tensors."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from toolkit.checkpoint.rank_writer import SafetensorsFile, WritePipeline
from toolkit.checkpoint.safetensors_header import DTYPES, HeaderError, TensorSpec, read_header

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
    pipeline = WritePipeline()
    try:
        file = SafetensorsFile(path.parent, path.name, [TensorSpec.of(*item) for item in tensors.items()], pipeline)
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.close()
    finally:
        pipeline.close()
    assert pipeline.wait()
    assert pipeline.failure is None
    (record,) = pipeline.records
    assert record.path == path.name
    return record.size, record.sha256


@pytest.fixture
def pipeline() -> Iterator[WritePipeline]:
    pipeline = WritePipeline()
    yield pipeline
    pipeline.close()


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


def test_a_large_tensor_is_written_in_several_buffers(tmp_path: Path) -> None:
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
        ("b", torch.zeros(3), r"b \[3\] float32 was given, where a \[2\] float32 is expected"),
        ("a", torch.zeros(3), r"a \[3\]"),
        ("a", torch.zeros(2).bfloat16(), "bfloat16"),
    ],
)
def test_an_unexpected_tensor_is_rejected(
    tmp_path: Path, pipeline: WritePipeline, name: str, tensor: torch.Tensor, said: str
) -> None:
    specs = [TensorSpec(name=name, shape=(size,), dtype=torch.float32) for name, size in (("a", 2), ("b", 3))]
    with pytest.raises(ValueError, match=said):
        SafetensorsFile(tmp_path, "file", specs, pipeline).write(name, tensor)


def test_a_tensor_may_come_in_runs_of_its_bytes(tmp_path: Path, pipeline: WritePipeline) -> None:
    tensors = {"a": torch.randn(7), "b": torch.randn(3)}
    file = SafetensorsFile(tmp_path, "file", [TensorSpec.of(*item) for item in tensors.items()], pipeline)
    content = tensors["a"].view(torch.uint8)
    file.write_bytes("a", [content[:5], content[5:9]])
    assert not file.is_complete
    file.write_bytes("a", [content[9:]])
    file.write("b", tensors["b"])
    file.close()
    pipeline.close()
    assert pipeline.wait()
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "file").items())


def test_too_many_and_too_few_bytes_of_a_tensor_are_rejected(tmp_path: Path, pipeline: WritePipeline) -> None:
    specs = [TensorSpec(name=name, shape=(2,), dtype=torch.float32) for name in ("a", "b")]
    file = SafetensorsFile(tmp_path, "file", specs, pipeline)
    with pytest.raises(ValueError, match="9 bytes were given, where a"):
        file.write_bytes("a", [torch.zeros(9, dtype=torch.uint8)])
    other = SafetensorsFile(tmp_path, "other", specs, pipeline)
    other.write_bytes("a", [torch.zeros(7, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="b was given, where a"):
        other.write_bytes("b", [torch.zeros(8, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"a \[2\] float32 is expected"):
        other.close()


def test_an_extra_tensor_is_rejected(tmp_path: Path, pipeline: WritePipeline) -> None:
    file = SafetensorsFile(tmp_path, "file", [TensorSpec.of("a", torch.zeros(2))], pipeline)
    file.write("a", torch.zeros(2))
    with pytest.raises(ValueError, match="all 1 tensors"):
        file.write("b", torch.zeros(2))


def test_a_file_with_a_tensor_missing_cannot_be_closed(tmp_path: Path, pipeline: WritePipeline) -> None:
    with pytest.raises(ValueError, match=r"a \[2\] float32 is expected"):
        SafetensorsFile(tmp_path, "file", [TensorSpec.of("a", torch.zeros(2))], pipeline).close()


def test_an_existing_file_is_not_overwritten(tmp_path: Path, pipeline: WritePipeline) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        SafetensorsFile(tmp_path, "file", [], pipeline)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_header_that_the_library_would_reject_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.checkpoint.safetensors_header._MAX_HEADER_BYTES", 100)
    with pytest.raises(HeaderError, match="would reject"):
        write(tmp_path / "file", TENSORS)
