"""`dstk plan`: its options, its tables, and the command."""
