"""`dstk calibrate`: this machine's own constants for the time model, measured in less than a minute."""
