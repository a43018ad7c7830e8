"""Data sets, samples and readers for the tests of segments."""

import numpy as np

from tensorforge.data import DatasetInfo, SampleSchema

ARRAYS = DatasetInfo(size=1000, schema=SampleSchema(dtype="<i4", shape=(3,)))

RECORDS = DatasetInfo(size=1000, schema=SampleSchema())


def array(start, stop):
    return np.arange(start * 3, stop * 3, dtype="<i4").reshape(-1, 3)


def records(start, stop):
    return [b"%d" % index * (index % 7) for index in range(start, stop)]


def collect(stream):
    return b"".join(bytes(stream.block(number)) for number in range(stream.blocks))


def reader(content):
    return lambda offset, length: memoryview(content)[offset : offset + length]
