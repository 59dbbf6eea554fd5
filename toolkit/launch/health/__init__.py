"""Heartbeats and hang detection: ends a job whose ranks wait for one that hangs or is dead, and names that rank."""
