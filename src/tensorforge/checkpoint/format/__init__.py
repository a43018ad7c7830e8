"""What a checkpoint looks like on disk: manifest, files, boxes, element types. Pure."""
