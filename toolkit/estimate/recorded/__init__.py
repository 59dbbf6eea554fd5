"""Recordings of the memory that a model's code keeps, as `toolkit.recorder` finds it: shipped, cached or asked for."""
