"""Real code on tensors without memory: recordings of activations, and rehearsals of whole layouts."""
