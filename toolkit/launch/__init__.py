"""Launch: rank environment, process group, local ranks, restarts and preemption; health/ detects ranks that hang."""
