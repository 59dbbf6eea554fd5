"""FAMILIES: every FamilySpec by its model_type, read from families.json, and the tensor-parallel plan of any family."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError, Refusal
from toolkit.models.families.plan_functions import FUSED, NEEDS
from toolkit.models.families.spec import ConfigSchema, FamilySpec
from toolkit.models.tensor_plan import GATHERING, STYLES, TensorPlan

PATH = Path(__file__).parents[1] / "families.json"
_SECTIONS = ("config", "tensor_plan")


def _read_families() -> dict[str, FamilySpec]:
    """Read families.json: rows with the fields of FamilySpec, under a title for families that are alike.

    `like` names a family whose fields count where the row has none, in each section by itself; not `ulysses_verified`,
    which a test has to show of each. `note` is for the reader.
    """
    table = json.loads(PATH.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {name: row for group in table["families"].values() for name, row in group.items()}
    for row in table["alike"]:
        rows |= dict.fromkeys(row.pop("names"), row)
    return {name: _read_spec(_with_base(row, rows)) for name, row in rows.items()}


def _with_base(row: dict[str, Any], rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if "like" not in row:
        return row
    base = _with_base(rows[row["like"]], rows) | {"ulysses_verified": False}
    sections = {name: base[name] | row[name] for name in _SECTIONS if base.get(name) and row.get(name)}
    return base | row | sections


def _read_spec(row: Mapping[str, Any]) -> FamilySpec:
    sections = {name: _read_section(row.get(name) or {}) for name in _SECTIONS}
    plan = sections["tensor_plan"]
    if "needs" in plan:
        plan["needs"] = NEEDS[plan["needs"]]
    plan["fused"] = {path: FUSED[name] for path, name in plan.get("fused", {}).items()}
    return FamilySpec(
        config=None if row.get("config") is None else ConfigSchema(**sections["config"]),
        tensor_plan=None if row.get("tensor_plan") is None else TensorPlan(**plan),
        **{name: value for name, value in row.items() if name not in (*_SECTIONS, "like", "note")},
    )


def _read_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}


FAMILIES = _read_families()
_NO_SPEC = FamilySpec()

CONFIG_SCHEMAS: Mapping[str, ConfigSchema] = {
    model_type: spec.config for model_type, spec in FAMILIES.items() if spec.config is not None
}
"""The families whose shape is read."""

RECOMPUTE_REMEDY = ("parallel.recompute", "full or none")


def find_spec(model_type: object) -> FamilySpec:
    """Return the spec of a family; an empty one where it needs none."""
    return FAMILIES.get(model_type, _NO_SPEC) if isinstance(model_type, str) else _NO_SPEC


def own_attention(config: Mapping[str, Any], attention: str | None) -> str | None:
    """Return why the attention of this config cannot be recomputed by itself; None where it can, or is not known.

    It must go through transformers' attention interface, whose function between the projections one wrapper can
    checkpoint. Older families write scores, softmax and context out in their own layers, as FamilySpec.attention says.
    A family without a FamilySpec is examined when its model is built.
    """
    family = config.get("model_type")
    attention_code = find_spec(family).attention
    if attention_code == "none":
        return f"{family} has no attention"
    if attention_code == "own":
        return f"{family} computes attention in its own layers, not through the attention interface of transformers"
    if attention == "eager" and config.get("reorder_and_upcast_attn"):
        return "reorder_and_upcast_attn=true with eager attention does not go through the interface of transformers"
    return None


def find_plan(model_type: str, config: Any) -> TensorPlan:
    """Return a family's tensor-parallel plan: ours, or the `base_model_tp_plan` that its config class publishes.

    Raises ModelError where there is neither, or where the plan has a style that is not supported.
    """
    spec = find_spec(model_type)
    plan = spec.tensor_plan
    if plan is not None:
        blocks = plan.gathered if not plan.gathered_with or getattr(config, plan.gathered_with) else ()
        styles = {
            path: GATHERING[style] if path.rpartition(".")[0] in blocks else style
            for path, style in plan.styles.items()
        }
        return replace(plan, styles=styles)
    published = getattr(config, "base_model_tp_plan", None)
    if not published:
        raise _unsupported(model_type, "neither Hugging Face nor this toolkit has a plan for it")
    return TensorPlan(styles=_inside_layers(model_type, published))


def _inside_layers(model_type: str, published: Mapping[str, str]) -> dict[str, str]:
    """Turn keys such as `layers.*.self_attn.q_proj` into `self_attn.q_proj`.

    What is outside the layers is left out, and routed experts, which toolkit/parallel/experts/ shards.
    """
    styles = {}
    for key, style in published.items():
        _, star, inside = key.partition(".*.")
        if not star or "experts" in inside.split("."):
            continue
        if style not in STYLES:
            raise _unsupported(model_type, f"the style {style} ({key}) cannot be split yet")
        styles[inside] = style
    return styles


def _unsupported(model_type: str, reason: str) -> ModelError:
    subject = ("tensor parallelism", ("model_type", model_type))
    return ModelError(Refusal(field="parallel.tp", settings=subject, reason=reason, remedy=(("parallel.tp", 1),)))
