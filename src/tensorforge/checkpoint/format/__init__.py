"""What a checkpoint looks like on disk: the manifest, the layout of its files, boxes of tensors, codecs.

Everything here is pure: values in, values out.
"""
