"""`dstk schedule`: options, and the timeline in a terminal."""
