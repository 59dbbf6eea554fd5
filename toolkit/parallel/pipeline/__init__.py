"""Pipeline stages that run Hugging Face's own forward pass over the layers of one stage."""
