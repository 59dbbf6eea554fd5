"""The calibration that `dstk calibrate` measured: its file, and the cluster that it describes. No torch."""
