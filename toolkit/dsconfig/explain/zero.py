"""Keys of `zero_optimization`, and of the files that offload to NVMe uses."""

from toolkit.dsconfig.buckets import of_a_layer
from toolkit.dsconfig.explain.key import Key
from toolkit.dsconfig.job import ConfigJob

_SHARDED = {
    0: "nothing is sharded",
    1: "optimizer states are sharded over dp",
    2: "optimizer states and gradients are sharded over dp",
    3: "optimizer states, gradients and parameters are sharded over dp",
}


def _bucket(job: ConfigJob) -> str:
    return (job.options.buckets or of_a_layer(job.shape.hidden)).reason


def _pinned(job: ConfigJob) -> str:
    return "copies to and from the GPU overlap" if job.device == "cuda" else "there is no GPU to copy to"


def _zeropp(name: str, on: str) -> Key:
    what = {
        "zero_hpz_partition_size": "hpZ: ranks that hold a second copy of the parameters, for the backward pass.",
        "zero_quantized_weights": "qwZ: gather parameters in 8 bits.",
        "zero_quantized_gradients": "qgZ: send gradients between nodes in 4 bits.",
    }[name]
    default = 1 if name == "zero_hpz_partition_size" else False
    return Key(
        what=what,
        default=default,
        why=lambda job: on if job.config["zero_optimization"][name] != default else "not asked for",
    )


ZERO = {
    "stage": Key(
        what="What is sharded over data-parallel ranks.", default=0, why=lambda j: _SHARDED[j.layout.zero_stage]
    ),
    "contiguous_gradients": Key(
        what="Copy gradients into one buffer as they come.", default=True, why="no fragmentation"
    ),
    "overlap_comm": Key(
        what="Reduce gradients while the backward pass goes on; a second bucket.",
        default=lambda job: job.layout.zero_stage == 3,
        why=lambda job: "streams of the GPU" if job.device == "cuda" else "a CPU has no streams",
    ),
    "reduce_scatter": Key(
        what="Each rank gets only its share of the reduced gradient.",
        default=True,
        why=lambda job: (
            "Muon needs whole gradients" if job.options.optimizer == "muon" else "half of all-reduce's bytes"
        ),
    ),
    "reduce_bucket_size": Key(what="Gradient elements reduced at a time.", default=500_000_000, why=_bucket),
    "allgather_partitions": Key(
        what="All-gather updated parameters; else broadcast from each rank.", default=True, why="one collective, not dp"
    ),
    "allgather_bucket_size": Key(what="Elements gathered at a time.", default=500_000_000, why=_bucket),
    "round_robin_gradients": Key(
        what="Spread the copying of gradients to host memory over ranks.",
        default=False,
        why="helps only stages 1 and 2 with offload, and changes the order of parameters",
    ),
    "ignore_unused_parameters": Key(
        what="Train on where a parameter got no gradient (stage 2).", default=True, why="frozen parameters are allowed"
    ),
    "stage3_prefetch_bucket_size": Key(
        what="Parameter elements fetched ahead of use.", default=50_000_000, why=_bucket
    ),
    "stage3_param_persistence_threshold": Key(
        what="Parameters of at most this many elements stay whole.",
        default=100_000,
        why="10 x hidden: biases and norms; gathering them costs more than keeping them",
    ),
    "stage3_max_live_parameters": Key(
        what="Whole parameter elements on a GPU before some are released.",
        default=1_000_000_000,
        why="the default is fine",
    ),
    "stage3_max_reuse_distance": Key(
        what="Keep a parameter that is used again within so many elements.",
        default=1_000_000_000,
        why="the default is fine",
    ),
    "stage3_gather_16bit_weights_on_model_save": Key(
        what="Gather the weights where a model is saved.", default=False, why="else the saved model has empty tensors"
    ),
    "sub_group_size": Key(
        what="Elements that the optimizer updates at a time.", default=1_000_000_000, why="the default is fine"
    ),
    "zero_hpz_partition_size": _zeropp("zero_hpz_partition_size", "gathers of the backward pass stay inside a node"),
    "zero_quantized_weights": _zeropp("zero_quantized_weights", "half the bytes of bf16"),
    "zero_quantized_gradients": _zeropp("zero_quantized_gradients", "an eighth of the bytes of fp32"),
}

OFFLOAD_OPTIMIZER = {
    "device": Key(what="Where optimizer states are kept, and the CPU updates them.", default="none", why="asked for"),
    "pin_memory": Key(what="Page-locked host memory.", default=True, why=_pinned),
    "nvme_path": Key(what="A folder on the drive.", why="asked for"),
    "buffer_count": Key(what="Buffers for what is read.", default=4, why="Adam: weight, gradient, two moments"),
    "pipeline_read": Key(
        what="Read the next part while one is updated.",
        default=False,
        why="more buffers; try it where the drive is slow",
    ),
    "pipeline_write": Key(
        what="Write the last part while one is updated.",
        default=False,
        why="more buffers; try it where the drive is slow",
    ),
    "fast_init": Key(what="A faster start of the states on the drive.", default=False, why="the default is fine"),
}

OFFLOAD_PARAM = {
    "device": Key(what="Where parameter shards are kept.", default="none", why="asked for"),
    "pin_memory": Key(what="Page-locked host memory.", default=True, why=_pinned),
    "nvme_path": Key(what="A folder on the drive.", why="asked for"),
    "buffer_count": Key(what="Buffers for what is read.", default=5, why="the default is fine"),
    "buffer_size": Key(
        what="Elements of a buffer.", default=100_000_000, why="the largest parameter's share of a rank must fit"
    ),
    "max_in_cpu": Key(what="Elements that may stay in host memory.", default=1_000_000_000, why="the default is fine"),
}

AIO = {
    "block_size": Key(what="Bytes of one request to the drive.", default=1_048_576, why="measure: `ds_nvme_tune`"),
    "queue_depth": Key(what="Requests under way.", default=8, why="measure: `ds_nvme_tune`"),
    "intra_op_parallelism": Key(what="Threads that share one file.", default=1, why="measure: `ds_nvme_tune`"),
    "single_submit": Key(what="Hand requests over one by one.", default=False, why="in batches is cheaper"),
    "overlap_events": Key(what="Hand over and collect at the same time.", default=True, why="the default is fine"),
    "use_gds": Key(what="GPUDirect Storage.", default=False, why="needs a driver that few machines have"),
}
