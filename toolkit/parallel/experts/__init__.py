"""Expert parallelism: the experts of a mixture, sharded over replicas and tensor-parallel ranks."""
