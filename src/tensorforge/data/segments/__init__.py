"""Samples on a disk: the file format of segments, the stores that hold them, and streams cut out of them."""
