"""The first hour on a GPU: tests, then speed and memory beside targets, peers and plans, in a given time."""
