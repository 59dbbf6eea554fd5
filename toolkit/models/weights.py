"""Counts of the weights that multiply activations: of a layer, of all, and of what is held of a mixture of experts."""

from toolkit.models.shape import ModelShape


def attention_matmul_parameters(shape: ModelShape) -> int:
    """Weights of one layer's attention that multiply activations: query, key, value and output."""
    if shape.latent is not None:
        return shape.latent.matmul_parameters(shape.hidden, shape.heads)
    return 2 * shape.hidden * shape.attention_dim + 2 * shape.hidden * shape.kv_dim


def layers_matmul_parameters(shape: ModelShape) -> int:
    """Weights of all decoder layers that a token multiplies: attention, the MLP, of routed experts the chosen few."""
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn
    layers = shape.layers
    experts = shape.experts
    if experts is None:
        return layers * (attention_matmul_parameters(shape) + mlp)
    mixture = experts.always + experts.per_token * experts.weights
    inside = experts.layers * mixture + (layers - experts.layers) * mlp
    return layers * attention_matmul_parameters(shape) + inside


def layer_matmul_parameters(shape: ModelShape) -> int:
    """Weights of a decoder layer that a token multiplies; of the mean layer, where not all layers have experts."""
    return layers_matmul_parameters(shape) // shape.layers


def routed_parameters(shape: ModelShape) -> float:
    """Weights of all routed experts of a layer, of the mean one."""
    return 0.0 if shape.experts is None else shape.experts.layers * shape.experts.routed / shape.layers


def held_layer_parameters(shape: ModelShape) -> float:
    """Weights of a layer's matrices, all experts included; of the mean one."""
    chosen = 0.0
    if shape.experts is not None:
        chosen = shape.experts.layers * shape.experts.per_token * shape.experts.weights / shape.layers
    return layers_matmul_parameters(shape) / shape.layers - chosen + routed_parameters(shape)


def head_matmul_parameters(shape: ModelShape) -> int:
    """Weights outside the layers that multiply activations: the LM head (tied or not) and OPT-350M's projections."""
    projections = 2 * shape.hidden * shape.embed_dim if shape.embed_dim != shape.hidden else 0
    return shape.vocab * shape.embed_dim + projections


def matmul_parameters(shape: ModelShape) -> int:
    """Weights that multiply activations: every linear layer, the LM head once. Embeddings are only looked up."""
    return layers_matmul_parameters(shape) + head_matmul_parameters(shape)
