"""A model of autograd without torch: tensors with a shape, strides and a storage, but no values."""
