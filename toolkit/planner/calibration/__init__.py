"""What `dstk calibrate` measured: the file, and the cluster that it describes. No torch."""
