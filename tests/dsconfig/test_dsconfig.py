"""DeepSpeed configs: what is written out, what a user's JSON may change, and that DeepSpeed takes them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.dsconfig import build, merge_user_config, read_user_config
from toolkit.dsconfig.merge import leaves
from toolkit.errors import ConfigError

Make = Callable[..., Recipe]


def config(recipe: Recipe, world_size: int = 2, **options: Any) -> dict[str, Any]:
    return build(Job.of(recipe, world_size), hidden_size=64, **options)


def test_the_three_batch_sizes_agree(make_recipe: Make) -> None:
    built = config(make_recipe(batch__micro_batch_size=2), world_size=4)
    assert built["train_batch_size"] == 16
    assert built["train_micro_batch_size_per_gpu"] * built["gradient_accumulation_steps"] * 4 == 16


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_clipping_is_always_written_out(make_recipe: Make, clip: float) -> None:
    assert config(make_recipe(train__grad_clip=clip))["gradient_clipping"] == clip


@pytest.mark.parametrize(("name", "decoupled"), [("adam", False), ("adamw", True)])
def test_adam_does_not_become_adamw(make_recipe: Make, name: str, decoupled: bool) -> None:
    built = config(make_recipe(optimizer={"name": name, "lr": 1e-3}))
    assert built["optimizer"]["params"]["adam_w_mode"] is decoupled


def test_a_bucket_holds_one_decoder_layer(make_recipe: Make) -> None:
    built = build(Job.of(make_recipe(parallel={"zero_stage": 2}), 2), hidden_size=1024)
    assert built["zero_optimization"]["reduce_bucket_size"] == 12 * 1024**2


@pytest.mark.parametrize(("axes", "ranks_per_replica"), [({"tp": 2}, 2), ({"pp": 2}, 2), ({"tp": 2, "pp": 2}, 4)])
def test_the_three_batch_sizes_count_replicas(make_recipe: Make, axes: dict[str, int], ranks_per_replica: int) -> None:
    built = config(make_recipe(parallel=axes, batch__micro_batch_size=2), world_size=8)
    assert built["gradient_accumulation_steps"] * 2 * 8 // ranks_per_replica == 16


def test_only_a_pipeline_has_a_pipeline_section(make_recipe: Make) -> None:
    plain, pipeline = config(make_recipe()), config(make_recipe(parallel={"pp": 2}))
    assert pipeline.keys() - plain.keys() == {"pipeline"}


def test_every_pipeline_key_is_one_that_deepspeed_reads(make_recipe: Make) -> None:
    import inspect

    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.pipe import engine

    built = config(make_recipe(parallel={"pp": 2}))
    read = get_pipeline_config({}).keys() | re.findall(r"_config\.pipeline\['(\w+)'\]", inspect.getsource(engine))
    assert built["pipeline"].keys() <= read


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, "none"), (1, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_nested_key_is_one_that_deepspeed_reads(
    make_recipe: Make, stage: int, precision: str, offload: str, device: str
) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    recipe = make_recipe(parallel={"zero_stage": stage, "offload_optimizer": offload}, precision=precision)
    built = config(recipe, device=device)
    DeepSpeedZeroConfig(**built["zero_optimization"])  # raises for a key that it does not know
    DeepSpeedFP16Config(**built["fp16"])


class TestUserConfig:
    """A user's DeepSpeed JSON merged with a recipe."""

    def test_what_the_recipe_does_not_decide_is_taken(self, make_recipe: Make) -> None:
        merged = merge_user_config(config(make_recipe()), {"flops_profiler": {"enabled": True}})
        assert merged["flops_profiler"] == {"enabled": True}

    def test_auto_is_filled_by_the_recipe(self, make_recipe: Make) -> None:
        built = config(make_recipe())
        user = {"train_batch_size": "auto", "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}}
        assert merge_user_config(built, user) == built

    @pytest.mark.parametrize(
        ("user", "decides"),
        [
            ({"train_batch_size": 17}, "batch.global_batch_size"),
            ({"train_micro_batch_size_per_gpu": 3}, "batch.micro_batch_size"),
            ({"gradient_accumulation_steps": 9}, "accumulation"),
            ({"gradient_clipping": 9.0}, "train.grad_clip"),
            ({"bf16": {"enabled": True}}, "precision"),
            ({"fp16": {"enabled": True}}, "precision"),
            ({"zero_optimization": {"stage": 3}}, "parallel.zero_stage"),
            ({"zero_optimization": {"stage": True}}, "parallel.zero_stage"),
            ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "parallel.offload_optimizer"),
            ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "parallel.offload_params"),
            ({"pipeline": {"use_reentrant": True}}, "the toolkit"),
            ({"optimizer": {"type": "Lamb"}}, "optimizer.name"),
            ({"optimizer": {"params": {"lr": 0.5}}}, "optimizer.lr"),
            ({"optimizer": {"params": {"weight_decay": 0.5}}}, "optimizer.weight_decay"),
            ({"scheduler": {"type": "WarmupLR"}}, "`schedule`"),
            ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.adam_w_mode"),
            ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.amsgrad"),
            ({"torch_autocast": {"enabled": True}}, "the toolkit"),
            ({"communication_data_type": "bf16"}, "the toolkit"),
            ({"managed_gradient_accumulation": False}, "the toolkit"),
            ({"gradient_predivide_factor": 4}, "the toolkit"),
            ({"expert_parallel": {"enabled": True}}, "the toolkit"),
            ({"use_data_before_expert_parallelism": True}, "the toolkit"),
            ({"bf16": True}, "not a section"),
            ({"zero_optimization": None}, "not a section"),
        ],
    )
    def test_a_contradiction_names_what_decides(self, make_recipe: Make, user: dict[str, Any], decides: str) -> None:
        (key,) = [name for name, _ in leaves(user)] if "scheduler" not in user else ["scheduler"]
        with refused(ConfigError, key) as found:
            merge_user_config(config(make_recipe()), user)
        assert decides in found[0].reason

    def test_every_contradiction_is_a_line_that_begins_with_the_file(self, make_recipe: Make) -> None:
        with pytest.raises(ConfigError) as caught:
            merge_user_config(config(make_recipe()), {"gradient_clipping": 9.0, "bf16": True}, name="ds.json")
        assert [refusal.field for refusal in caught.value.refusals] == ["bf16", "gradient_clipping"]
        assert all(
            line.startswith(f"ds.json: {refusal.field}=")
            for line, refusal in zip(caught.value.problems, caught.value.refusals, strict=True)
        )

    @pytest.mark.parametrize(
        ("key", "value", "decides"),
        [("activation_checkpoint_interval", 1, "parallel.recompute"), ("pipe_partitioned", True, "the toolkit")],
    )
    def test_what_stages_do_is_decided(self, make_recipe: Make, key: str, value: object, decides: str) -> None:
        with refused(ConfigError, f"pipeline.{key}") as found:
            merge_user_config(config(make_recipe(parallel={"pp": 2})), {"pipeline": {key: value}})
        assert decides in found[0].reason

    @pytest.mark.parametrize("key", ["reduce_scatter", "contiguous_gradients"])
    def test_what_deepspeed_asserts_of_shared_out_experts_is_decided(self, make_recipe: Make, key: str) -> None:
        built, user = config(make_recipe()), {"zero_optimization": {key: False}}
        assert merge_user_config(built, user)["zero_optimization"][key] is False
        with refused(ConfigError, f"zero_optimization.{key}") as found:
            merge_user_config(built, user, shares_experts=True)
        assert "parallel.ep" in found[0].reason

    def test_the_same_value_is_no_contradiction(self, make_recipe: Make) -> None:
        built = config(make_recipe())
        assert merge_user_config(built, json.loads(json.dumps(built))) == built

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "it is not JSON"),
            ("[]", "an object|a JSON object"),
            ('{"a": 1, "a": 2}', "given twice"),
            ('{"a": NaN}', "NaN"),
        ],
    )
    def test_a_broken_file_is_one_line(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "ds.json").write_text(text)
        with pytest.raises(ConfigError, match=message) as error:
            read_user_config(tmp_path / "ds.json")
        assert "\n" not in str(error.value)

    def test_a_missing_file_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            read_user_config(tmp_path / "gone.json")
