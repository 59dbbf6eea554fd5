import pytest

from toolkit.errors import RunError
from toolkit.hardware import find_gpu, gpu, gpus


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA B200", "B200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM-16GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
    ],
)
def test_the_name_pytorch_gives_a_device_finds_it(device_name, name):
    found = find_gpu(device_name)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40", "cpu", ""],
)
def test_a_namesake_is_another_device(device_name):
    assert find_gpu(device_name) is None


def test_no_two_entries_answer_to_the_same_name():
    names = [name for entry in map(gpu, gpus()) for name in (entry.name, *entry.device_names)]
    assert all(gpu(name) is gpu(name.lower()) for name in names)
    assert len({gpu(name).name for name in names}) == len(gpus())


@pytest.mark.parametrize("name", gpus())
def test_16_bit_products_are_faster_than_tf32_and_tf32_than_fp32(name):
    entry = gpu(name)
    tf32 = entry.tf32_flops or entry.fp32_flops
    assert entry.fp16_flops > tf32 >= entry.fp32_flops


@pytest.mark.parametrize("name", gpus())
def test_memory_is_close_to_the_size_in_the_name_of_the_device(name):
    sizes = {"B200": 180, "H200": 141, "L40S": 48, "T4": 16, "MI300X": 192, "MI250X-GCD": 64}
    size = sizes.get(name) or (int(name[:-2].rpartition("-")[2]) if name.endswith("GB") else 24)
    assert 0.9 * size < gpu(name).memory_bytes / 2**30 < size


def test_a_peak_is_dense():
    assert gpu("h100-sxm-80gb").peak_flops("bf16") == 989.4e12


def test_a_precision_without_matrix_units_is_an_error():
    with pytest.raises(RunError, match="precision=bf16 on V100-SXM-32GB: it has matrix units for fp16, fp32"):
        gpu("V100-SXM-32GB").peak_flops("bf16")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("h100", "H100-SXM-80GB, H100-PCIe-80GB"),
        ("A100", "A100-SXM-80GB, A100-SXM-40GB, A100-PCIe-80GB, A100-PCIe-40GB"),
    ],
)
def test_a_chip_alone_is_answered_with_all_its_boards(given, nearest):
    with pytest.raises(RunError, match=f"Nearest: {nearest}"):
        gpu(given)


def test_an_unknown_gpu_is_an_error_with_the_nearest_names():
    with pytest.raises(RunError, match=r"Nearest: .*H100-SXM-80GB"):
        gpu("H100-90GB")


@pytest.mark.parametrize(("short", "name"), [("H100-80", "H100-SXM-80GB"), ("a100-40GB", "A100-SXM-40GB")])
def test_a_name_without_a_board_is_the_sxm_one(short, name):
    assert gpu(short).name == name
