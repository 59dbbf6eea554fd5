"""Files in the memory of a job's hosts: a server on each, which outlives the ranks, and a file system over all."""
