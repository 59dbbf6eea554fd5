"""What `toolkit.recorder` found that a model's code keeps in memory: shipped, cached or asked for."""
