import re

import pytest

from toolkit.errors import RunError
from toolkit.hardware import find_gpu, gpu, gpus, variant_note


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),  # the name counts the CPU's memory
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA H800", "H800-SXM-80GB"),
        ("NVIDIA H800 PCIe", "H800-PCIe-80GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM-80GB"),
        ("NVIDIA A800 80GB PCIe", "A800-PCIe-80GB"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("AMD Instinct MI325X", "MI325X"),
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
    sizes |= {"GB300": 270, "GB200": 186, "B300": 270, "RTX5090": 32, "RTXA6000": 48, "MI325X": 256}
    size = sizes.get(name) or (int(name[:-2].rpartition("-")[2]) if name.endswith("GB") else 24)
    assert 0.9 * size < gpu(name).memory_bytes / 2**30 < size


def test_a_peak_is_dense():
    assert gpu("h100-sxm-80gb").peak_flops("bf16") == 989.4e12


def test_a_precision_without_matrix_units_has_no_peak():
    assert gpu("V100-SXM-32GB").peak_flops("bf16") is None


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("B300", [267.69]),  # vLLM and Modal logs, 2026; nvidia-smi: 275,040 MiB
        ("GH200-96GB", [94.50]),
        ("GH200-144GB", [153008209920 / 2**30]),  # cuDeviceTotalMem
        ("RTX5090", [31.34, 31.36, 31.37, 31.39]),
        ("RTXA6000", [47.40, 47.41, 47.50, 47.53]),
        ("MI325X", [255.69, 255.98]),
    ],
)
def test_memory_is_what_out_of_memory_messages_report_rounded_down(name, reported):
    # "GPU 0 has a total capacity of 31.36 GiB", from public logs and issues
    assert 0 <= min(reported) - gpu(name).memory_bytes / 2**30 < 0.1


def test_exported_chips_compute_as_the_original_and_link_slower():
    # NVLink of 400 GB/s in both directions: github.com/deepseek-ai/DeepSeek-V3, arXiv 2505.09343 for the H800
    for exported, original in (("H800-SXM-80GB", "H100-SXM-80GB"), ("A800-SXM-80GB", "A100-SXM-80GB")):
        assert gpu(exported).peak_flops("bf16") == gpu(original).peak_flops("bf16")
        assert gpu(exported).link_bytes_per_second == 200e9 < gpu(original).link_bytes_per_second


def test_an_unknown_gpu_is_an_error_with_the_nearest_names():
    for name, near in (("H100-90GB", "H100-SXM-80GB"), ("H10", "H100"), ("MI300", "MI300X"), ("A600", "A6000")):
        with pytest.raises(RunError) as caught:
            gpu(name)
        assert caught.value.refusal.settings == (("gpu", name),)
        assert near in re.split("[ ,?]+", caught.value.refusal.remedy[0])


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("H100", "H100-SXM-80GB"),
        ("a100", "A100-SXM-80GB"),
        ("V100", "V100-SXM-32GB"),
        ("gh200", "GH200-96GB"),
        ("A100-PCIe", "A100-PCIe-80GB"),
    ],
)
def test_a_chip_alone_is_its_common_variant_and_a_note_says_so(short, name):
    assert gpu(short).name == name
    assert variant_note(short).startswith(f"--gpu {short} is taken for {name}; others are ")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("H100-80", "H100-SXM-80GB"),
        ("a100-40GB", "A100-SXM-40GB"),
        ("a100 80 gb", "A100-SXM-80GB"),
        ("h100-sxm", "H100-SXM-80GB"),
        ("H100-SXM5-80GB", "H100-SXM-80GB"),
        ("h100_pcie", "H100-PCIe-80GB"),
        ("h200-141gb", "H200"),
        ("b200-192gb", "B200"),
        ("gh200-144", "GH200-144GB"),
        ("h800", "H800-SXM-80GB"),
        ("4090", "RTX4090"),
        ("rtx 4090", "RTX4090"),
        ("RTX-5090", "RTX5090"),
        ("a6000", "RTXA6000"),
        ("nvidia rtx a6000", "RTXA6000"),
        ("mi300x", "MI300X"),
        ("mi325x-256gb", "MI325X"),
        ("mi250x", "MI250X-GCD"),
        ("T4 16GB", "T4"),
        ("a10", "A10"),
    ],
)
def test_a_name_with_a_memory_or_of_one_gpu_needs_no_note(alias, name):
    assert gpu(alias).name == name
    assert variant_note(alias) is None


@pytest.mark.parametrize(
    "name", ["", "80", "80gb", "sxm", "nvidia", "L40", "RTX 3090 Ti", "H100 NVL", "a100-60gb", "²"]
)
def test_another_gpus_name_is_refused_in_one_line_that_lists_few(name):
    with pytest.raises(RunError) as error:
        gpu(name)
    assert len(str(error.value)) < 110
    assert variant_note(name) is None


def test_no_note_is_needed_where_no_gpu_is_named():
    assert variant_note(None) is None
