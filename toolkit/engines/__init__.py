"""Training engines: DeepSpeed, its pipeline and Ulysses, accelerate (DDP, FSDP2), and the reference."""
