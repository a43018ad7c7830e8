"""Where things are kept: the metadata database, and blobs.

database.py   SQLite or PostgreSQL behind one small surface; prepared.py: its hot statements;
              batches.py: several changes in one commit
blobs.py      what a blob store must offer; which keys are allowed
local.py      blobs as files; staged.py: files that nobody sees before they are finished;
              ranged.py: reading a range of a file; system.py: the system calls that write
memory.py     blobs in memory
opening.py    a store by its path or URL
"""
